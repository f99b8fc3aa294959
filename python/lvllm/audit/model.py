"""What is known about a model: from its folder's config.json, else from its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lvllm.audit import names
from lvllm.audit.facts import Fact
from lvllm.audit.values import number

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)[Bb](?![A-Za-z0-9]*[a-z]{3})")
_ACTIVE = re.compile(r"[Aa](\d+(?:\.\d+)?)[Bb](?![A-Za-z])")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Model:
    """A model; None = unknown."""

    name: str
    source: str
    family: str = ""
    params_b: float | None = None
    moe: bool | None = None
    mla: str = "no"
    mtp: bool | None = False
    context: int | None = None
    layers: int | None = None
    attention_layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    kv_lora: int | None = None
    rope: int | None = None
    experts: int | None = None
    expert_share: float | None = None
    dense_layers: int | None = None
    quantized: str | None = None
    bytes_per_param: float = 2.0
    weight_bytes: int | None = None
    multimodal: bool = False
    pooling: bool = False
    drafter: str | None = None

    @property
    def known(self) -> bool:
        return bool(self.family) or self.params_b is not None or self.source == "config.json"

    @property
    def weights_gib(self) -> float | None:
        """Size of the checkpoint as it is."""
        if self.weight_bytes is not None:
            return self.weight_bytes / GIB
        return None if self.params_b is None else self.params_b * 1e9 * self.bytes_per_param / GIB

    @property
    def expert_gib(self) -> float | None:
        """Size of the routed experts."""
        weights = self.weights_gib
        return None if weights is None or not self.moe else weights * (self.expert_share or 0.93)

    @property
    def any_mla(self) -> bool:
        return self.mla in ("yes", "sparse")

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float | None:
        """KV cache of one token over all layers, before tensor parallelism."""
        layers = self.attention_layers or self.layers
        if layers is None:
            return None
        if self.kv_lora is not None:
            return layers * (self.kv_lora + (self.rope or 0)) * bytes_per_value
        if self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * layers * self.kv_heads * self.head_dim * bytes_per_value


def from_name(name: str) -> Model:
    """What the name of a checkpoint says."""
    text = name.rstrip("/")
    lower = text.lower()
    model = Model(text, "name")
    size = _size(text)
    family = next((f for f in names.table("models")["family"] if re.search(f["pattern"], lower)), None)
    if family is not None:
        mtp = family["mtp"]
        context = family["context"]
        longer = family.get("long_context")
        if longer and re.search(longer["pattern"], lower):
            context = longer["context"]
        shape = _shape(family, lower, size)
        model = replace(
            model, family=family["name"], moe=family["moe"], mla=family["mla"],
            mtp=None if mtp == "unknown" else mtp, context=context,
            multimodal=family.get("multimodal", False), pooling=family.get("pooling", False),
            drafter=family.get("drafter"), **{k: v for k, v in shape.items() if k in _SHAPE_FIELDS},
        )  # fmt: skip
        size = shape.get("real_b") or shape.get("params_b") or size
    if _ACTIVE.search(text) and model.moe is not True:
        model = replace(model, moe=True)
    model = replace(model, params_b=size)
    kind, width = _quantized(lower)
    if kind is None and family is not None and family.get("native") and "bf16" not in lower:
        kind = width = family["native"]
    if kind is not None:
        model = replace(
            model, quantized=kind, bytes_per_param=names.table("models")["bytes_per_param"][width]
        )
    return model


_SHAPE_FIELDS = ("layers", "attention_layers", "heads", "kv_heads", "head_dim", "kv_lora", "rope", "experts",
                 "expert_share", "dense_layers")  # fmt: skip


def _size(text: str) -> float | None:
    base = text.rsplit("/", 1)[-1]
    match = next(
        (m for m in _SIZE.finditer(base) if base[m.start() - 1 : m.start()] not in "aA" or m.start() == 0),
        None,
    )
    if match is None:
        return None
    return float(match.group(2)) * (int(match.group(1)) if match.group(1) else 1)


def _shape(family: dict[str, Any], lower: str, size: float | None) -> dict[str, Any]:
    """The published checkpoint of a family that a name means."""
    sizes: list[dict[str, Any]] = family.get("sizes", [])
    for entry in sizes:
        if "match" in entry and re.search(entry["match"], lower):
            return entry
    plain = [s for s in sizes if "match" not in s]
    if size is None:
        return plain[0] if len(plain) == 1 else {}
    for entry in plain:
        if abs(entry["params_b"] - size) <= 0.05 * size:
            return entry
    return {}


def _quantized(lower: str) -> tuple[str | None, str]:
    for entry in names.table("models")["quantized"]:
        if re.search(entry["pattern"], lower):
            return entry["kind"], entry["bytes"]
    return None, "bf16"


def from_config(name: str, text: str, quant_text: str | None, index_text: str | None) -> Model | None:
    """A model folder: config.json, hf_quant_config.json and the index of its weights."""
    config = _object(text)
    if config is None:
        return None
    inner = config.get("text_config")
    body: dict[str, Any] = {**config, **inner} if isinstance(inner, dict) else config

    def whole(*keys: str) -> int | None:
        for key in keys:
            value = body.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
        return None

    base = from_name(name)
    experts = whole("num_experts", "n_routed_experts", "num_local_experts")
    heads, hidden = whole("num_attention_heads"), whole("hidden_size")
    head_dim = whole("head_dim") or (hidden // heads if heads and hidden else None)
    architectures = body.get("architectures")
    kind = f"{body.get('model_type', '')} {architectures if isinstance(architectures, list) else ''}".lower()
    known = next((c for c in names.table("models")["config"] if re.search(c["pattern"], kind)), None)
    kv_lora = whole("kv_lora_rank")
    model = replace(
        base, source="config.json", moe=bool(experts and experts > 1), experts=experts or None,
        layers=whole("num_hidden_layers", "num_layers", "n_layer"), heads=heads, head_dim=head_dim,
        kv_heads=whole("num_key_value_heads") or heads, kv_lora=kv_lora, rope=whole("qk_rope_head_dim"),
        context=whole("max_position_embeddings", "n_positions") or base.context,
        dense_layers=whole("first_k_dense_replace") if experts else None, attention_layers=None,
        mla=known["mla"] if known else ("yes" if kv_lora else "no"),
        mtp=bool(known["mtp"]) if known else bool(whole("num_nextn_predict_layers")),
        multimodal="vision_config" in config or "audio_config" in config,
    )  # fmt: skip
    return _sized(_with_quantization(model, config, quant_text), body, index_text)


def _with_quantization(model: Model, config: dict[str, Any], quant_text: str | None) -> Model:
    section = config.get("quantization_config")
    method = str(section.get("quant_method", "")) if isinstance(section, dict) else ""
    if not method and quant_text is not None:
        parsed = _object(quant_text) or {}
        inner = parsed.get("quantization")
        method = str(inner.get("quant_algo", "")).lower() if isinstance(inner, dict) else ""
    if not method:
        return model
    bits = section.get("bits") if isinstance(section, dict) else None
    kind = {"awq": "awq", "gptq": "gptq8" if bits == 8 else "gptq", "fp8": "fp8", "mxfp4": "mxfp4",
            "bitsandbytes": "bitsandbytes", "nvfp4": "nvfp4"}.get(method, method)  # fmt: skip
    widths = names.table("models")["bytes_per_param"]
    width = widths.get(kind, widths["w4"] if kind in ("awq", "gptq", "bitsandbytes") else widths["int8"])
    return replace(model, quantized=kind, bytes_per_param=width)


def _sized(model: Model, body: dict[str, Any], index_text: str | None) -> Model:
    """Total bytes from the weight index; else parameters from the shape when the name gives none."""
    index = _object(index_text) if index_text is not None else None
    metadata = index.get("metadata") if index is not None else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, int) and total > 0:
        model = replace(
            model, weight_bytes=total, params_b=model.params_b or total / model.bytes_per_param / 1e9
        )
    share = _expert_share(model, body)
    return replace(model, expert_share=share) if share is not None else model


def _expert_share(model: Model, body: dict[str, Any]) -> float | None:
    """Share of the weights in routed experts, from hidden and expert sizes."""
    hidden = number(body.get("hidden_size"))
    width = number(body.get("moe_intermediate_size") or body.get("intermediate_size"))
    if not (model.moe and model.experts and model.layers and hidden and width and model.weights_gib):
        return None
    layers = model.layers - (model.dense_layers or 0)
    size = 3.0 * hidden * width * model.experts * layers * model.bytes_per_param / GIB
    return min(0.99, size / model.weights_gib)


def _object(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def resolve(fact: Fact | None, read: Callable[[str], str | None]) -> Model | None:
    """The model that a unit names; `read` gives the text of a project file or None."""
    if fact is None or not isinstance(fact.value, str) or not fact.value.strip():
        return None
    name = fact.value.strip()
    folder = name.removeprefix("./").rstrip("/")
    text = read(f"{folder}/config.json")
    if text is not None:
        found = from_config(
            name, text, read(f"{folder}/hf_quant_config.json"), read(f"{folder}/model.safetensors.index.json")
        )
        if found is not None:
            return found
    return from_name(name)
