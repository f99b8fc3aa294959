"""Hand-over of routed tokens from a GPU's stream to the CPU engine and back, and what watches over it.

A step is two kernel launches on the current stream (send, receive), whether it runs eagerly or is being
captured. With full CUDA graphs no Python of ours runs in a step any more, so failures of the engine are
looked for where every step begins and where its tokens leave the worker.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lvllm.vllm.formats import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from lvllm import _lk


class LayerHandover:
    """One layer's way over: its engine layer, and its number once the hand-over exists."""

    def __init__(self, hub: Hub, engine_layer: _lk.Layer) -> None:
        self.hub = hub
        self.engine_layer = engine_layer
        self.number: int | None = None

    def ready(self, device: torch.device, expert_map: torch.Tensor | None) -> _lk.Handover:
        """The hand-over with this layer in it; made on the first call, which vLLM's profile run makes."""
        native = self.hub.native
        if native is None or self.number is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"lvllm: {self.engine_layer.name}: captured before it ever ran; run the model once "
                    "eagerly before capturing CUDA graphs"
                )
            native = self.hub.attach(device)
            local_ids = None if expert_map is None else [int(i) for i in expert_map.tolist()]
            self.number = native.add_layer(self.engine_layer, local_ids)
        return native

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        is_padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Launch the step's send and receive on the current stream; a fresh [T, H] of hidden_states' dtype.

        hidden_states [T, H], topk_weights and topk_ids [T, k], is_padding [T] bool or None. Rows of padding
        are zeros. Steps longer than a slot go over in parts.
        """
        native = self.ready(hidden_states.device, expert_map)
        assert self.number is not None
        rows = hidden_states.contiguous()
        ids = topk_ids.to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        output = torch.empty_like(rows)
        stream = torch.cuda.current_stream(rows.device).cuda_stream
        capacity = native.capacity_tokens
        for first in range(0, rows.shape[0], capacity):
            part = slice(first, min(first + capacity, rows.shape[0]))
            count = part.stop - first
            mask = 0 if is_padding is None else is_padding[part].data_ptr()
            native.send(
                self.number,
                stream,
                rows[part].data_ptr(),
                ids[part].data_ptr(),
                weights[part].data_ptr(),
                count,
                mask,
            )
            native.receive(self.number, stream, output[part].data_ptr(), count, mask)
        return output


class Hub:
    """The hand-over of one engine: what its layers need of the slots, and the native object once built."""

    def __init__(self, engine: _lk.Engine) -> None:
        self.engine = engine
        self.native: _lk.Handover | None = None
        self._lock = threading.Lock()
        self._capacity_tokens = 0
        self._max_hidden_size = 0
        self._max_top_k = 0
        self._dtype = torch.bfloat16

    def enrol(
        self, layer: _lk.Layer, *, hidden_size: int, top_k: int, dtype: torch.dtype, max_tokens: int
    ) -> LayerHandover:
        """Reserve room for a layer; before the first forward of any."""
        self._capacity_tokens = max(self._capacity_tokens, max_tokens)
        self._max_hidden_size = max(self._max_hidden_size, hidden_size)
        self._max_top_k = max(self._max_top_k, top_k)
        if dtype.itemsize > self._dtype.itemsize:
            self._dtype = dtype
        return LayerHandover(self, layer)

    def attach(self, device: torch.device) -> _lk.Handover:
        """The native hand-over, made now if there is none. Raises LkError with a way out."""
        with self._lock:
            if self.native is not None:
                return self.native
            import vllm.envs
            from vllm.logger import init_logger

            index = torch.cuda.current_device() if device.index is None else device.index
            self.native = self.engine.attach_cuda(
                index,
                capacity_tokens=self._capacity_tokens,
                max_hidden_size=self._max_hidden_size,
                max_top_k=self._max_top_k,
                dtype=DTYPE_NAMES[self._dtype],
                cache_dir=str(Path(vllm.envs.VLLM_CACHE_ROOT) / "lvllm"),
                nvrtc_dirs=nvrtc_folders(),
            )
            facts = self.native.describe()
            init_logger("vllm.lvllm").info(
                "hand-over to cuda:%d: %d tokens a slot, %.0f MB pinned, trial %.1f us a round%s",
                index,
                self._capacity_tokens,
                facts["pinned_bytes"] / 1e6,
                facts["round_trip_us"],
                "".join(f"; {note}" for note in facts["notes"]),
            )
            guard_steps()
            return self.native


# By identity; engines live as long as their process.
_HUBS: dict[int, Hub] = {}


def hub_of(engine: _lk.Engine) -> Hub:
    """The hand-over of an engine."""
    return _HUBS.setdefault(id(engine), Hub(engine))


def nvrtc_folders() -> list[str]:
    """Folders of the NVRTC library that torch's CUDA build brings along, outside of the loader's path."""
    try:
        import nvidia
    except ImportError:
        return []
    found = (lib for root in nvidia.__path__ for lib in Path(root).glob("*/lib"))
    return sorted(str(folder) for folder in found if any(folder.glob("libnvrtc.so*")))


def padding_of(context: Any, num_rows: int) -> torch.Tensor | None:
    """The step's mask of padding rows, or None when the forward context does not tell.

    vLLM pads decode steps to a captured size. Its mask is one buffer for all steps, so its address may be
    captured. Rows gathered from other ranks (data parallel) have no mask.
    """
    mask: torch.Tensor | None = getattr(context, "is_padding", None)
    if mask is None:
        mappings = context.slot_mapping
        mapping = next(iter(mappings.values()), None) if isinstance(mappings, dict) else None
        if mapping is None or mapping.shape[0] != num_rows:
            return None
        return mapping < 0
    if mask.shape[0] != num_rows or mask.dtype != torch.bool:
        return None
    return mask.contiguous()


def check() -> None:
    """Raise LkError when the engine behind any hand-over of this process has failed."""
    for hub in _HUBS.values():
        if hub.native is not None:
            hub.native.check()


def wake() -> None:
    """A step is about to be launched: leaders that nap begin to spin."""
    for hub in _HUBS.values():
        if hub.native is not None:
            hub.native.wake()


def guard_steps() -> None:
    """Patch the worker's step: see whether the engine is well before it, and before its tokens leave.

    Goes when vLLM's workers have a hook around a step.
    """
    from vllm.v1.worker.gpu_worker import Worker

    from lvllm.vllm.install import wrap

    wrap(Worker, "execute_model", _checked_step, ("self", "scheduler_output"))
    wrap(Worker, "sample_tokens", _checked_step, ("self", "grammar_output"))


def _checked_step(stock: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        check()
        wake()
        return _checked_output(stock(self, *args, **kwargs))

    return step


def _checked_output(output: Any) -> Any:
    """The same output; if its tokens are still on the device, the check follows when they are fetched."""
    fetch = getattr(output, "get_output", None)
    if fetch is None:
        check()
        return output

    @functools.wraps(fetch)
    def get_output(*args: Any, **kwargs: Any) -> Any:
        fetched = fetch(*args, **kwargs)
        check()
        return fetched

    output.get_output = get_output
    return output
