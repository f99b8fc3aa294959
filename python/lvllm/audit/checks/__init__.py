"""The checks: one function per item, one module per category; texts and priorities in ``data/rules``."""

from __future__ import annotations

from functools import cache


@cache
def load_all() -> None:
    """Import every module of checks, which registers them."""
    from lvllm.audit.checks import (  # noqa: F401
        advisories,
        attention,
        batching,
        engine,
        environment,
        hybrid,
        hybrid_host,
        memory,
        parallel,
        quantization,
        rl,
        serving,
        speculative,
    )
