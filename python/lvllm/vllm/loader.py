"""Weight intake: from vLLM's weight loaders into the engine's arena, expert by expert.

vLLM creates the expert parameters as usual, in host memory that the system commits page by page as it is
written. The stock weight loader, which knows tensor parallelism, expert maps and padding, is wrapped: what it
writes is counted per parameter and expert. As soon as all parameters of an expert are complete, the engine
packs the expert and the pages go back, so that the peak is the model plus what is in flight. Models that fill
a parameter directly (gpt-oss, fused checkpoints) never enter the wrapper; their experts are packed when vLLM
calls process_weights_after_loading.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lvllm.native import load as load_native
from lvllm.vllm.formats import DTYPE_NAMES, WeightFormat

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from lvllm import _lk
    from lvllm.vllm.progress import LoadProgress

_PAGE = 4096
# A scalar scale is stored by fill_ with a tensor; fill_ with a number only clears padding.
_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor)
_NAME = "lvllm_parameter_name"
_STOCK_LOADER = "lvllm_stock_loader"


class IncompleteWeightsError(RuntimeError):
    """A parameter of an expert was not written exactly once; the text names layer, parameter and experts."""


class _WriteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects (storage address, written view) of the copies made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[tuple[int, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WRITES:
            target = args[0]
            self.writes.append((target.untyped_storage().data_ptr(), target))
        return func(*args, **(kwargs or {}))


def lazy_parameter(param: torch.nn.Parameter) -> Any:
    """Move a parameter onto a LazyBuffer (contents are dropped: they read as zero). Returns the buffer."""
    buffer = load_native().LazyBuffer(max(1, param.nbytes))
    raw = (ctypes.c_uint8 * max(1, param.nbytes)).from_address(buffer.data_ptr)
    raw._owner = buffer  # type: ignore[attr-defined]  # torch keeps `raw` alive, `raw` keeps the pages
    flat = torch.frombuffer(raw, dtype=torch.uint8)[: param.nbytes]
    param.data = flat.view(param.dtype).view(param.shape)
    return buffer


class LayerIntake:
    """The weights of one layer on their way into the engine, at the first load and at every reload."""

    def __init__(
        self,
        layer: RoutedExperts,
        params: dict[str, torch.nn.Parameter],
        fmt: WeightFormat,
        engine_layer: _lk.Layer,
        progress: LoadProgress,
        *,
        skip_w2_bias: bool,
    ) -> None:
        self.layer_name = layer.layer_name
        self.engine_layer = engine_layer
        self.progress = progress
        self.num_experts = layer.local_num_experts
        self.names = fmt.tensors
        self.skip_w2_bias = skip_w2_bias
        self.elements = {n: params[n].numel() // self.num_experts for n in fmt.tensors}
        self.expert_bytes = sum(self.elements[n] * params[n].element_size() for n in fmt.tensors)
        self.buffers = {n: lazy_parameter(p) for n, p in params.items()}
        self.sealed = False
        self._restart()
        for name, param in params.items():
            attributes = vars(param)
            # vLLM's own parameter classes keep the loader behind a read-only property.
            slot = "weight_loader" if "weight_loader" in attributes else "_weight_loader"
            attributes[_NAME] = name
            attributes[_STOCK_LOADER] = attributes[slot]
            # A bound method of the layer, as the stock one is: vLLM's reload strips exactly such references
            # from the metadata that it keeps, so that a model can be freed.
            attributes[slot] = types.MethodType(_counting_weight_loader, layer)

    def _restart(self) -> None:
        self.written = {n: [0] * self.num_experts for n in self.names}
        self.packed = [False] * self.num_experts

    def reopen(self) -> None:
        """Begin a reload: the engine forgets the layer's weights."""
        self.engine_layer.reset()
        self.sealed = False
        self._restart()

    def note_writes(self, name: str, param: torch.Tensor, counter: _WriteCounter) -> list[int]:
        """Add the counted writes into `param` to their experts; returns the experts that were touched."""
        if name not in self.written:
            return []
        storage = param.untyped_storage().data_ptr()
        touched = []
        stride = param.stride(0)
        for address, target in counter.writes:
            if address != storage or target.numel() == 0:
                continue
            first = (target.storage_offset() - param.storage_offset()) // stride
            spans = [
                (s, d) for s, d in zip(target.stride(), target.shape, strict=True) if s >= stride and d > 1
            ]
            count = spans[0][1] if spans else 1
            for expert in range(first, first + count):
                self.written[name][expert] += target.numel() // count
                touched.append(expert)
        return touched

    def complete(self, expert: int) -> bool:
        return all(self.written[n][expert] >= self.elements[n] for n in self.names)

    def pack(self, expert: int, params: dict[str, torch.Tensor]) -> None:
        """Hand one expert to the engine and give its pages back."""
        native = load_native()
        tensors = {}
        for name in self.names:
            part = params[name][expert]
            if name == "w2_bias" and self.skip_w2_bias:
                part = torch.zeros_like(part)
            part = part.contiguous()
            tensors[name] = native.TensorRef(
                part.data_ptr(), part.nbytes, DTYPE_NAMES[part.dtype], tuple(part.shape), part
            )
        self.engine_layer.load_expert(expert, tensors)
        del tensors
        self.packed[expert] = True
        self.progress.add(self.layer_name, self.expert_bytes, self.engine_layer)
        for name in self.names:
            self._release(name, params[name], expert)

    def _release(self, name: str, param: torch.Tensor, expert: int) -> None:
        buffer = self.buffers.get(name)
        if buffer is None or param.data_ptr() != buffer.data_ptr:
            return  # a reload's own memory, freed with the parameter
        size = self.elements[name] * param.element_size()
        # Pages at the ends may hold the neighbours' bytes.
        begin = -(-expert * size // _PAGE) * _PAGE
        end = (expert + 1) * size // _PAGE * _PAGE
        if end > begin:
            buffer.release(begin, end - begin)

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        """Pack what was filled directly, check that every tensor was written exactly once, seal the layer."""
        remaining = [e for e in range(self.num_experts) if not self.packed[e]]
        for name in self.names:
            self._check_counts(name, params[name], remaining)
        for expert in remaining:
            self.pack(expert, params)
        self.engine_layer.seal()
        self.sealed = True
        self.buffers.clear()
        self.progress.layer_done(self.layer_name, self.engine_layer)

    def _check_counts(self, name: str, param: torch.Tensor, remaining: list[int]) -> None:
        counts, full = self.written[name], self.elements[name]
        if remaining and not any(counts):
            # Never through the loader: either filled directly or not at all, and an untouched buffer has no
            # pages.
            buffer = self.buffers.get(name)
            if buffer is not None and param.data_ptr() == buffer.data_ptr and buffer.resident_bytes() == 0:
                raise IncompleteWeightsError(
                    f"lvllm: {self.layer_name}: {name} was never loaded: the checkpoint has no tensor for "
                    "it. Download the checkpoint again or compare its index with its files."
                )
            return
        for kind, experts in (
            ("incomplete", [e for e in range(self.num_experts) if counts[e] < full]),
            ("written more than once", [e for e in range(self.num_experts) if counts[e] > full]),
        ):
            if experts:
                shown = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
                raise IncompleteWeightsError(
                    f"lvllm: {self.layer_name}: {name} of {len(experts)} experts ({shown}) is {kind}: "
                    f"{counts[experts[0]]} of {full} elements for expert {experts[0]}. "
                    "Download the checkpoint again or compare its index with its files."
                )


def _counting_weight_loader(
    self: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """The layer's stock weight loader, counted. `self` is the RoutedExperts layer."""
    stock: Callable[..., bool | None] = getattr(param, _STOCK_LOADER)
    intake: LayerIntake = self.quant_method.intake
    if param.is_meta:
        # vLLM's reload calls the loader on a placeholder first, to learn how much it would write.
        return stock(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
    if intake.sealed:
        intake.reopen()
    with _WriteCounter() as counter:
        result: bool | None = stock(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
    touched = intake.note_writes(getattr(param, _NAME), param.data, counter)
    ready = [e for e in touched if not intake.packed[e] and intake.complete(e)]
    if ready:
        params = {n: getattr(self, n).data for n in intake.names}
        for expert in ready:
            intake.pack(expert, params)
    return result


_counting_weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
