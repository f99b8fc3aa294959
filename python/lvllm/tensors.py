"""Arrays of numpy or torch as TensorRef, without a copy. Neither library is imported here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lvllm.native import load as load_native

if TYPE_CHECKING:
    from lvllm import _lk

_NAMES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "uint8": "u8",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e8m0fnu": "f8_e8m0",
}
_BITS = {("uint16", "bf16"), ("uint16", "f16"), ("uint8", "f8_e4m3"), ("uint8", "f8_e8m0"), ("int16", "bf16")}


def is_torch(array: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def dtype_name(array: Any) -> str:
    """The element type by its library's name, e.g. "bfloat16"; ml_dtypes and torch agree on names."""
    return str(array.dtype).removeprefix("torch.")


def tensor_ref(array: Any, what: str, *, dtype: str | None = None) -> _lk.TensorRef:
    """Describe a contiguous host array for the engine; the reference keeps the array alive.

    what: the argument's name, for messages. dtype: the engine's element type where the array holds raw bits,
    such as bf16 in uint16 (numpy has no bf16 of its own; ml_dtypes.bfloat16 needs no such help). Raises
    TypeError for what is no array of a known type and ValueError for one that is not contiguous or not in
    host memory.
    """
    if is_torch(array):
        if array.device.type != "cpu":
            raise ValueError(f"{what} is on {array.device}; the engine reads host memory: pass {what}.cpu()")
        contiguous, pointer, nbytes = array.is_contiguous(), array.data_ptr(), array.nbytes
    elif hasattr(array, "__array_interface__"):
        contiguous = array.flags["C_CONTIGUOUS"]
        pointer, nbytes = array.__array_interface__["data"][0], array.nbytes
    else:
        raise TypeError(f"{what} must be a numpy array or a torch tensor, not {type(array).__name__}")
    if not contiguous:
        raise ValueError(f"{what} of shape {tuple(array.shape)} is not contiguous; pass a contiguous copy")
    own = dtype_name(array)
    name = _NAMES.get(own)
    if dtype is not None and dtype != name:
        if (own, dtype) not in _BITS:
            raise TypeError(f"{what} has dtype {own}, where {dtype} is wanted")
        name = dtype
    if name is None:
        raise TypeError(
            f"{what} has dtype {own}; allowed: {', '.join(_NAMES)}, or bf16 as uint16 with dtype given"
        )
    shape = tuple(int(n) for n in array.shape)
    ref: _lk.TensorRef = load_native().TensorRef(pointer, nbytes, name, shape, array)
    return ref


def empty_like(array: Any) -> Any:
    """A new contiguous array of the same library, shape and dtype."""
    if is_torch(array):
        torch = sys.modules["torch"]
        return torch.empty(array.shape, dtype=array.dtype)
    numpy = sys.modules["numpy"]
    return numpy.empty(array.shape, dtype=array.dtype)
