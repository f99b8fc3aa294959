"""One reader per kind of file; each turns text into `FileFacts` and never raises."""
