"""Routed experts of MoE models on the CPU: a plugin for stock vLLM, and its engine as a library.

Importing this package is free: it loads neither the native module, nor torch, nor vLLM. The library's names
are resolved on first use:

    import lvllm
    engine = lvllm.Engine(threads=8)
    layer = lvllm.MoELayer.from_arrays(engine, {"w13_weight": w13, "w2_weight": w2}, top_k=8)
    output = layer.forward(hidden_states, topk_ids, topk_weights)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lvllm.engine import Engine, MoELayer
    from lvllm.native import LkError, NativeModuleError, UnsupportedFormatError
    from lvllm.native import version as __version__

__all__ = ["Engine", "LkError", "MoELayer", "NativeModuleError", "UnsupportedFormatError", "__version__"]

_HOME = {
    "Engine": "lvllm.engine",
    "MoELayer": "lvllm.engine",
    "LkError": "lvllm.native",
    "NativeModuleError": "lvllm.native",
    "UnsupportedFormatError": "lvllm.native",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("lvllm.native").version()
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'lvllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
