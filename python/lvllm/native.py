"""The one place that loads the native module `lvllm._lk`, and says why when it cannot."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any


class NativeModuleError(ImportError):
    """The native module is missing or cannot be loaded; the text holds the loader's own message."""


if TYPE_CHECKING:
    from lvllm._lk import LkError, UnsupportedFormatError

    __all__ = ["LkError", "NativeModuleError", "UnsupportedFormatError", "load", "version"]


def load() -> ModuleType:
    """The native module. Raises NativeModuleError with the dynamic loader's message and a way out."""
    try:
        return importlib.import_module("lvllm._lk")
    except ImportError as error:
        raise NativeModuleError(
            f"lvllm: the native module lvllm._lk cannot be loaded: {error}. Reinstall it with `pip install "
            "--force-reinstall --no-deps lvllm`; if the message names GLIBC or libstdc++, this system is "
            "older than the wheel's manylinux tag. To serve with stock vLLM meanwhile, unset "
            "LVLLM_MOE_NUMA_ENABLED."
        ) from error


def version() -> str:
    """Version of the installed distribution; of the native module when there is no distribution."""
    try:
        return importlib.metadata.version("lvllm")
    except importlib.metadata.PackageNotFoundError:
        return str(load().__version__)


def __getattr__(name: str) -> Any:
    if name in ("LkError", "UnsupportedFormatError"):
        return getattr(load(), name)
    raise AttributeError(f"module 'lvllm.native' has no attribute {name!r}")
