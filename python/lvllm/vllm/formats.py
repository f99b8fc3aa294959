"""From vLLM's method object and parameters to what the engine is told: format, dtype, activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "f8_e4m3",
    torch.float8_e8m0fnu: "f8_e8m0",
}


class UnsupportedLayerError(RuntimeError):
    """A MoE layer cannot be computed on the host; the text names the layer, the reason and a way out."""


@dataclass(frozen=True)
class WeightFormat:
    """How a layer's expert weights are stored.

    name: the engine's format name. tensors: the layer's parameters that the engine takes, by vLLM's names;
    others that create_weights registers (activation scales, shapes) are of no use to the engine.
    """

    name: str
    tensors: tuple[str, ...]
    group_size: int | None = None


def way_out(layer_name: str) -> str:
    return (
        "Keep the layer on stock vLLM's path with LVLLM_GPU_RESIDENT_MOE_LAYERS, or unset "
        f"LVLLM_MOE_NUMA_ENABLED ({layer_name})."
    )


def weight_format(layer: RoutedExperts, method: str, params: dict[str, torch.nn.Parameter]) -> WeightFormat:
    """Format of a layer whose stock method class is called `method` and has registered `params`.

    Raises UnsupportedLayerError when the engine has no decoder for what the checkpoint holds.
    """
    weight = params.get("w13_weight")
    biases = tuple(n for n in ("w13_bias", "w2_bias") if n in params)
    if (
        method == "UnquantizedFusedMoEMethod"
        and weight is not None
        and weight.dtype
        in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        )
    ):
        return WeightFormat(DTYPE_NAMES[weight.dtype], ("w13_weight", "w2_weight", *biases))
    shown = ", ".join(
        f"{n} {tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}" for n, p in params.items()
    )
    raise UnsupportedLayerError(
        f"lvllm: {layer.layer_name}: no host decoder for experts of {method} with {shown}. "
        f"{way_out(layer.layer_name)}"
    )


def layer_options(layer: RoutedExperts, fmt: WeightFormat, max_tokens: int) -> dict[str, Any]:
    """Keyword arguments of Engine.create_layer for a vLLM layer. Sizes are this rank's."""
    config = layer.moe_config
    activation = layer.activation.value
    options: dict[str, Any] = {
        "format": fmt.name,
        "num_experts": layer.local_num_experts,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size_per_partition,
        "top_k": layer.top_k,
        "dtype": DTYPE_NAMES[config.in_dtype],
        "gated": config.is_act_and_mul,
        "interleaved": activation == "swigluoai",
        "w13_bias": "w13_bias" in fmt.tensors,
        "w2_bias": "w2_bias" in fmt.tensors,
        "router_weight_on_input": layer.apply_router_weight_on_input,
        "group_size": fmt.group_size,
        "max_tokens": max_tokens,
    }
    limit = layer.swiglu_limit if layer.swiglu_limit is not None else config.swiglu_limit
    alpha = layer.swiglu_alpha if layer.swiglu_alpha is not None else config.swiglu_alpha
    beta = layer.swiglu_beta if layer.swiglu_beta is not None else config.swiglu_beta
    # Constants that the model leaves open (gpt-oss's alpha 1.702 and clamp 7) are the engine's defaults.
    options["activation"] = activation.removesuffix("_no_mul")
    options |= {"limit": limit, "alpha": alpha, "beta": beta}
    if activation == "situ":
        options |= {
            "beta": config.activation_situ_beta,
            "linear_beta": config.activation_situ_linear_beta,
        }
    return options
