"""One step of one layer: the custom op that hands routed tokens to the engine.

The op is opaque to torch.compile. On a GPU vLLM already hides the whole MoE layer behind an op of its own; on
the CPU platform it does not, and Dynamo would trace into the engine call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from lvllm.native import load as load_native
from lvllm.vllm import handover
from lvllm.vllm.formats import DTYPE_NAMES

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from lvllm import _lk

DEVICES = ("cpu", "cuda")
"""Device types of hidden_states that this build can take tokens from."""

_LIBRARY = Library("lvllm", "FRAGMENT")  # type: ignore[no-untyped-call]


def no_handover(device: str) -> str:
    """Why tokens on `device` cannot be computed here, and the way out."""
    return (
        f"tokens on {device} cannot be handed over to the CPU engine; it serves vLLM's CPU platform and "
        "NVIDIA GPUs. Unset LVLLM_MOE_NUMA_ENABLED to serve with stock vLLM."
    )


def _ref(tensor: torch.Tensor) -> _lk.TensorRef:
    ref: _lk.TensorRef = load_native().TensorRef(
        tensor.data_ptr(), tensor.nbytes, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor
    )
    return ref


def run(
    layer: RoutedExperts, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Blocking forward on host tensors. Returns a fresh [T, H] tensor of hidden_states' dtype.

    The runner scales the result in place and the next norm writes into it, so it is never a shared buffer.
    """
    output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    if hidden_states.shape[0] == 0:
        return output
    expert_map: torch.Tensor | None = layer._expert_map  # type: ignore[assignment]
    engine_layer: _lk.Layer = layer.quant_method.host.engine_layer  # type: ignore[attr-defined]
    engine_layer.forward(
        _ref(hidden_states.contiguous()),
        _ref(topk_ids.to(torch.int32).contiguous()),
        _ref(topk_weights.to(torch.float32).contiguous()),
        _ref(output),
        None if expert_map is None else _ref(expert_map.to(device="cpu", dtype=torch.int32).contiguous()),
    )
    return output


def run_on_gpu(
    context: Any,
    layer: RoutedExperts,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Launch the step's hand-over on the current stream; waits for nothing. Returns a fresh [T, H] tensor."""
    way: handover.LayerHandover = layer.quant_method.host.handover  # type: ignore[attr-defined]
    expert_map: torch.Tensor | None = layer._expert_map  # type: ignore[assignment]
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    if context.attn_metadata is None and not torch.cuda.is_current_stream_capturing():
        # Memory profiling and warm-up: the slots must exist from now on, the numbers do not matter.
        way.ready(hidden_states.device, expert_map)
        return torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    is_padding = handover.padding_of(context, hidden_states.shape[0])
    return way.forward(hidden_states, topk_weights, topk_ids, expert_map, is_padding)


def _moe_cpu(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: LayerNameType
) -> torch.Tensor:
    # The forward context belongs to one model instance, so the same layer name in two models cannot be
    # confused.
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)].routed_experts
    if hidden_states.device.type == "cuda":
        return run_on_gpu(context, layer, hidden_states, topk_weights, topk_ids)
    return run(layer, hidden_states, topk_weights, topk_ids)


def _moe_cpu_fake(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: LayerNameType
) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


direct_register_custom_op(
    op_name="moe_cpu",
    op_func=_moe_cpu,
    fake_impl=_moe_cpu_fake,
    target_lib=_LIBRARY,
)


def apply(
    layer: RoutedExperts, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Routed experts of one layer: hidden_states [T, H], topk_* [T, k]; returns a fresh [T, H]."""
    if hidden_states.device.type not in DEVICES:
        raise NotImplementedError(f"lvllm: {layer.layer_name}: {no_handover(hidden_states.device.type)}")
    output: torch.Tensor = torch.ops.lvllm.moe_cpu(
        hidden_states, topk_weights, topk_ids, _encode_layer_name(layer.layer_name)
    )
    return output
