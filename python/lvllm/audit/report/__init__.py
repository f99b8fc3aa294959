"""The report: a JSON tree, and the same as Markdown."""
