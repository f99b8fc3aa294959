"""`lvllm audit`: reads a project that uses vLLM and reports how it is configured.

Only reads: nothing of the audited project is imported or run, no server is
started, no network is used, and neither vLLM, torch nor the native module is
imported.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`argv` without the program name); returns the exit code."""
    from lvllm.audit.cli import main as run

    return run(argv)
