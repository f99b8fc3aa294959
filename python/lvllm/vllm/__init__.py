"""Integration with vLLM. Nothing here is imported unless the master switch is on."""
