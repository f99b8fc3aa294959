"""Which part of the model a MoE layer belongs to, where its experts go and why, and the account of all."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lvllm.host import gb
from lvllm.ranges import LayerSelection, format_numbers, select_layers
from lvllm.vllm.progress import LoadProgress

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

    from lvllm import _lk, envs

_INDEX = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
_DRAFT_PREFIXES = ("mtp.", "draft_model.", "model.mtp.")


class PlacementError(RuntimeError):
    """MoE layers that nobody computes as asked; the text names them and a way out."""


@dataclass(frozen=True)
class LayerId:
    """part: "main" or "mtp" (any draft); index: layer number within the part."""

    part: str
    index: int

    def __str__(self) -> str:
        return f"{self.part}:{self.index}"


def identify(layer_name: str, num_main: int) -> LayerId:
    """Part and number from the prefix, e.g. `model.layers.61.mlp.experts` of a 61-layer model is mtp:0.

    A draft model has its own prefix, or numbers that begin after the target's layers.
    """
    match = _INDEX.search(layer_name)
    index = int(match[1]) if match else 0
    if layer_name.startswith(_DRAFT_PREFIXES):
        return LayerId("mtp", index - num_main if index >= num_main else index)
    if index >= num_main:
        return LayerId("mtp", index - num_main)
    return LayerId("main", index)


@dataclass
class Row:
    """One MoE layer in the account. where: "host" or "stock"."""

    layer: str
    id: LayerId
    where: str
    reason: str
    format: str = ""
    bytes: int = 0
    bytes_per_node: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """Account of the MoE layers of one engine configuration (target and draft model of one worker)."""

    def __init__(self, settings: envs.Settings, num_main: int, num_draft: int) -> None:
        self.num_main = num_main
        self.num_draft = num_draft
        self.progress = LoadProgress()
        self._rows: dict[str, Row] = {}
        self._layers: dict[str, _lk.Layer] = {}
        self.resident = LayerSelection()
        for spec, name in (
            (settings.gpu_resident_moe_layers, "LVLLM_GPU_RESIDENT_MOE_LAYERS"),
            (settings.gpu_resident_moe_layers_spec, "LVLLM_GPU_RESIDENT_MOE_LAYERS_SPEC"),
        ):
            chosen = select_layers(spec, num_main=num_main, num_draft=num_draft, variable=name)
            self.resident.main |= chosen.main
            self.resident.draft |= chosen.draft
            self.resident.notes += chosen.notes

    def place(self, layer: LayerId) -> str:
        """ "stock" for a layer that the user keeps on stock vLLM's path, else "host"."""
        kept = self.resident.main if layer.part == "main" else self.resident.draft
        return "stock" if layer.index in kept else "host"

    def builds(self, layer: LayerId) -> bool:
        """Whether the layer is built, and on the host; checkpoints hold draft layers nobody asked for."""
        count = self.num_main if layer.part == "main" else self.num_draft
        return layer.index < count and self.place(layer) == "host"

    def decide(self, layer_name: str) -> Row:
        """Where a layer goes. Recorded; asking again gives the same row."""
        if layer_name not in self._rows:
            layer = identify(layer_name, self.num_main)
            where = self.place(layer)
            reason = "named by LVLLM_GPU_RESIDENT_MOE_LAYERS" if where == "stock" else "default"
            self._rows[layer_name] = Row(layer_name, layer, where, reason)
        return self._rows[layer_name]

    def claim(self, layer_name: str, engine_layer: _lk.Layer, fmt: str) -> None:
        self.decide(layer_name).format = fmt
        self._layers[layer_name] = engine_layer

    def rows(self) -> list[Row]:
        """All rows in model order with the bytes that the engine holds now."""
        for name, engine_layer in self._layers.items():
            self._rows[name].bytes = engine_layer.bytes
            self._rows[name].bytes_per_node = tuple(engine_layer.bytes_per_node)
        return sorted(self._rows.values(), key=lambda r: (r.id.part, r.id.index, r.layer))

    def dense_among_resident(self) -> list[str]:
        """Layers that were named as resident and turned out to have no experts."""
        seen = {(r.id.part, r.id.index) for r in self._rows.values()}
        dense = [LayerId("main", i) for i in sorted(self.resident.main) if ("main", i) not in seen]
        return [str(layer) for layer in dense]

    def table(self) -> str:
        """The rows, consecutive equal ones joined: layers, place, reason, format, bytes."""
        lines = []
        for group in _joined(self.rows()):
            first = group[0]
            layers = f"{first.id.part}:{format_numbers([r.id.index for r in group])}"
            per_node = [sum(column) for column in zip(*(r.bytes_per_node for r in group), strict=False)]
            nodes = f" ({', '.join(gb(n) for n in per_node)} per node)" if len(per_node) > 1 else ""
            size = f", {gb(sum(r.bytes for r in group))}{nodes}" if first.where == "host" else ""
            fmt = f", {first.format}" if first.format else ""
            lines.append(f"  {layers:<14} -> {first.where:<5} ({first.reason}{fmt}{size})")
        return "\n".join(lines)


def _joined(rows: list[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        key = (row.id.part, row.where, row.reason, row.format)
        if group and key != (group[0].id.part, group[0].where, group[0].reason, group[0].format):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


# By identity: vLLM's configuration objects compare by value and cannot be hashed.
_LEDGERS: dict[int, Ledger] = {}


def draft_layers(config: VllmConfig) -> int:
    """Number of draft (MTP) layers that this configuration builds; 0 without speculation by a model."""
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None:
        return 0
    text = draft.hf_text_config
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "n_predict"):
        count = getattr(text, name, None)
        if isinstance(count, int) and count > 0:
            return count
    return int(getattr(text, "num_hidden_layers", 0) or 0)


def ledger(config: VllmConfig) -> Ledger:
    """The account of a configuration. Target and draft share the compilation config, and so the account."""
    shared = config.compilation_config
    found = _LEDGERS.get(id(shared))
    if found is None:
        from lvllm.vllm.worker import settings_of

        text = config.model_config.hf_text_config
        found = Ledger(settings_of(config), int(text.num_hidden_layers), draft_layers(config))
        _LEDGERS[id(shared)] = found
        weakref.finalize(shared, _LEDGERS.pop, id(shared), None)
    return found


def decide(layer_name: str) -> Row:
    """Where a layer of the model that is being built goes."""
    from vllm.config import get_current_vllm_config

    return ledger(get_current_vllm_config()).decide(layer_name)


def ledger_of(model: torch.nn.Module) -> Ledger:
    """The account of a loaded model, for reports."""
    found: Ledger = model.lvllm_ledger  # type: ignore[assignment]
    return found


def account(model: torch.nn.Module, config: VllmConfig, model_config: ModelConfig) -> None:
    """After a model is loaded: every MoE layer is on the host, or on stock's path by the user's wish."""
    from vllm.logger import init_logger
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from lvllm.vllm.method import is_host

    logger = init_logger("vllm.lvllm")
    book = ledger(config)
    object.__setattr__(model, "lvllm_ledger", book)
    rows = {r.layer: r for r in book.rows()}
    unclaimed = []
    seen = 0
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            seen += 1
            row = rows.get(module.layer_name)
            if row is None or (row.where == "host") != is_host(module.quant_method):
                unclaimed.append(f"{module.layer_name} ({type(module.quant_method).__name__})")
        elif holds_experts(module, model_config.get_num_experts()):
            unclaimed.append(f"{name} ({type(module).__name__})")
    if unclaimed:
        raise PlacementError(
            "lvllm: experts that the engine does not see: "
            f"{', '.join(unclaimed[:8])}{' ...' if len(unclaimed) > 8 else ''}. This model computes them "
            "outside vLLM's RoutedExperts, or replaced the method after lvllm had placed it (moe_backend, "
            "LoRA). Serve it with LVLLM_MOE_NUMA_ENABLED unset."
        )
    if not seen and model_config.is_moe and model_config is config.model_config:
        raise PlacementError(
            f"lvllm: {model_config.model} is a mixture-of-experts model ({model_config.get_num_experts()} "
            "experts), but no layer of it uses vLLM's RoutedExperts, so nothing was placed on the host. "
            "Serve it with LVLLM_MOE_NUMA_ENABLED unset."
        )
    if not seen:
        logger.warning(
            "lvllm: %s has no MoE layer; LVLLM_MOE_NUMA_ENABLED has no effect on it", model_config.model
        )
        return
    for note in book.resident.notes:
        logger.warning("%s", note)
    if dense := book.dense_among_resident():
        logger.info(
            "LVLLM_GPU_RESIDENT_MOE_LAYERS: %s have no experts (dense) and are skipped", ", ".join(dense)
        )
    logger.info("placement of the MoE layers of %s:\n%s", model_config.model, book.table())


def holds_experts(module: torch.nn.Module, num_experts: int) -> bool:
    """Whether a module other than RoutedExperts owns weights stacked over the experts."""
    if num_experts <= 1:
        return False
    return any(
        p is not None
        and p.dim() == 3
        and p.shape[0] == num_experts
        and ("w13" in n or "w2" in n or "gate_up" in n)
        for n, p in module._parameters.items()
    )
