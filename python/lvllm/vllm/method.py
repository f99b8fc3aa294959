"""The host form of a stock expert method: parameters in host memory, experts computed by the engine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lvllm.vllm import placement, step, worker
from lvllm.vllm.formats import UnsupportedLayerError, way_out

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

_HOST = "lvllm_host_method"


def is_host(method: object) -> bool:
    """Whether a quant_method is one of ours."""
    return getattr(type(method), _HOST, False)


def to_host(
    layer: RoutedExperts, stock: FusedMoEMethodBase, moe_config: FusedMoEConfig
) -> FusedMoEMethodBase:
    """Re-class a stock method object if its layer belongs on the host; return it untouched if not.

    The object keeps its stock class as base and its class name: vLLM's weight loader dispatches on the name.
    """
    if is_host(stock):
        return stock
    decision = placement.decide(layer.layer_name)
    if decision.where != "host":
        return stock
    if getattr(stock, "uses_meta_device", False):
        raise UnsupportedLayerError(
            f"lvllm: {layer.layer_name}: {type(stock).__name__} quantises while loading, on the GPU. Serve a "
            f"checkpoint that is quantised already, drop --quantization, or: {way_out(layer.layer_name)}"
        )
    if moe_config.is_lora_enabled:
        raise UnsupportedLayerError(
            f"lvllm: {layer.layer_name}: LoRA on experts is not computed on the host. Drop --enable-lora, "
            f"or: {way_out(layer.layer_name)}"
        )
    stock.__class__ = host_class(type(stock))  # type: ignore[arg-type]
    return stock


@functools.cache
def host_class(base: type[Any]) -> type[Any]:
    """Subclass of one stock method class. A single base keeps the object layout for __class__ assignment."""

    class Host(base):  # type: ignore[misc]
        # Class attributes shadow the stock properties of the same name.
        requires_device_loading = False
        is_monolithic = False
        supports_internal_mk = False
        mk_can_overlap_shared_experts = False
        has_unpadded_output = False
        skip_forward_padding = False
        supports_eplb = False
        supports_pre_processed_weights = False
        topk_indices_dtype = torch.int32

        def maybe_roundup_sizes(
            self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
        ) -> tuple[int, int]:
            return hidden_size, intermediate_size_per_partition

        def create_weights(self, layer: RoutedExperts, **kwargs: Any) -> None:
            before = set(layer._parameters)
            with torch.device("cpu"):
                super().create_weights(layer=layer, **kwargs)
            created = [n for n in layer._parameters if n not in before]
            self.host = worker.HostLayer(layer, base.__name__, created)
            self.intake = self.host.intake

        def process_weights_after_loading(self, layer: RoutedExperts) -> None:
            self.host.finish(layer)

        def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
            from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

            return FusedMoEQuantConfig.make()

        def apply(
            self,
            layer: RoutedExperts,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: Any = None,
            shared_experts_input: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return step.apply(layer, x, topk_weights, topk_ids)

        def apply_monolithic(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise AssertionError("host experts take routed ids; is_monolithic is False")

    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Host, attribute, getattr(base, attribute))
    setattr(Host, _HOST, True)
    return Host
