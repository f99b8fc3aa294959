"""B. Memory."""

from __future__ import annotations

from lvllm.audit import names
from lvllm.audit.checks.context import Context, Edit, Outcome
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact, State, Unit
from lvllm.audit.values import boolean, number

_LONG = 32_768
_BASE_BLOCK = 16
_HOST_GIB_FOR_OFFLOAD = 64


def sleeps(c: Context) -> bool:
    """Whether the engine releases its memory between steps."""
    if c.unit.framework == "swift":
        level = c.key("sleep_level")
        return level is not None and (not level.known or (number(level.value) or 0) > 0)
    if c.unit.framework == "verl":
        free = c.key("free_cache_engine")
        if free is not None and boolean(free.value) is False:
            return False
    if c.unit.framework == "unsloth" and c.env_flag("UNSLOTH_VLLM_STANDBY"):
        return True
    fact = c.fact("enable_sleep_mode")
    return fact is not None and (not fact.known or boolean(fact.value) is True)


@check("B1")
def memory_fraction(c: Context) -> Outcome:
    fact = c.fact("gpu_memory_utilization")
    if c.has("kv_cache_memory_bytes") or (fact is not None and not fact.known):
        return c.out("B1.ok", fact)
    value = c.num("gpu_memory_utilization")
    if fact is not None and value is not None and not 0 < value <= 1:
        return c.out("B1.invalid", fact, edits=[Edit("gpu_memory_utilization", None)])
    if value is not None and value > 0.97:
        return c.out("B1.too_high", fact, edits=[Edit("gpu_memory_utilization", "0.95")])
    if c.colocate and not sleeps(c):
        in_force = c.fraction
        if in_force >= 0.7:
            return c.out("B1.colocate_high", fact or c.unit.site, value=f"{in_force:g}")
        if in_force >= 0.5:
            return c.out("B1.colocate_mid", fact or c.unit.site, value=f"{in_force:g}")
    shared = _shared(c)
    if shared is not None:
        other, total = shared
        return c.out("B1.shared_gpus", fact, other.settings.get("gpu_memory_utilization") or other.site,
                     total=f"{total:.2f}")  # fmt: skip
    default = names.table("options")["defaults"]["gpu_memory_utilization"]
    written = fact is not None and fact.state is not State.FRAMEWORK
    alone = not c.rlhf and c.unit.launcher != "config" and written and shared_with(c) is None
    if value is not None and value < 0.8 and alone and fact is not None:
        edits = [Edit("gpu_memory_utilization", None)] if fact.state is State.LITERAL else []
        return c.out("B1.low", fact, default=default, edits=edits)
    if fact is None and c.version.below(names.table("options")["defaults"]["gpu_memory_utilization_since"]):
        return c.out("B1.old_default", c.version.site)
    return c.out("B1.ok", fact)


def gpu_set(unit: Unit) -> frozenset[str] | None:
    """The GPUs that a unit is given, if the project says so."""
    devices = unit.env.get("CUDA_VISIBLE_DEVICES") or unit.env.get("NVIDIA_VISIBLE_DEVICES")
    if devices is not None and devices.known and isinstance(devices.value, str):
        ids = frozenset(d.strip() for d in devices.value.split(",") if d.strip().isdigit())
        return ids or None
    gpus = unit.resources.gpus
    if gpus is not None and gpus.origin == "compose" and any(ch.isdigit() for ch in gpus.written):
        return frozenset(d.strip() for d in gpus.written.split(","))
    return None


def shared_with(c: Context) -> Unit | None:
    """Another engine of the same file group on one of the same GPUs."""
    mine = gpu_set(c.unit)
    if mine is None:
        return None
    for other in c.neighbours:
        theirs = gpu_set(other)
        same_host = other.site.file == c.unit.site.file
        if theirs is not None and same_host and mine & theirs and not other.documentation:
            return other
    return None


def _shared(c: Context) -> tuple[Unit, float] | None:
    other = shared_with(c)
    if other is None or c.rlhf:
        return None
    fact: Fact | None = other.settings.get("gpu_memory_utilization")
    if fact is not None and not fact.known:
        return None
    default = names.table("options")["defaults"]["gpu_memory_utilization"]
    theirs = number(fact.value) if fact is not None else float(default)
    total = c.fraction + (theirs or 0.0)
    return (other, total) if total > 0.95 else None


@check("B2")
def maximum_length(c: Context) -> Outcome:
    fact = c.fact("max_model_len")
    limit = c.model_limit
    tokens = _max_tokens(c)
    if fact is None:
        visible_need = (
            tokens is not None and limit is not None and tokens <= limit / 8 and c.offline and not c.rlhf
        )
        if limit is not None and limit >= _LONG and (c.serve or visible_need):
            return c.out("B2.unset_long", c.fact("model"), limit=limit)
        return c.out("B2.ok" if limit is not None else "B2.model_unknown", None)
    value = c.num("max_model_len")
    if value is None or value <= 0:
        return c.out("B2.set", fact)
    allowed = c.env_flag("VLLM_ALLOW_LONG_MAX_MODEL_LEN") or c.has("hf_overrides") or c.has("rope_scaling")
    exact = c.model is not None and (c.model.source == "config.json" or bool(c.model.layers))
    if limit is not None and exact and value > limit and not allowed:
        return c.out("B2.above_limit", fact, limit=limit)
    if tokens is not None and tokens >= value:
        return c.out("B2.below_request", fact, tokens=int(tokens))
    return c.out("B2.set", fact)


def _max_tokens(c: Context) -> float | None:
    found = [number(s.value) for s in c.unit.sampling if s.name == "max_tokens" and s.known]
    known = [f for f in found if f is not None]
    return max(known) if known else None


@check("B3")
def kv_cache_type(c: Context) -> Outcome:
    scales = c.fact("calculate_kv_scales")
    if scales is not None:
        gone = c.gone(c.since("kv_scales_gone"))
        return c.out("B3.scales_gone" if gone else "B3.scales_old", scales,
                     edits=[Edit("calculate_kv_scales", None)] if gone else [])  # fmt: skip
    fact = c.fact("kv_cache_dtype")
    value = c.text("kv_cache_dtype")
    gpu = c.hardware.gpu
    if fact is not None and value is not None:
        if value == "fp8_e5m2" and backend(c) == "FLASH_ATTN":
            return c.out("B3.e5m2_flash", fact, c.fact("attention_backend"))
        prefixes = tuple(names.choices("kv_cache_dtype_prefixes"))
        if value not in names.choices("kv_cache_dtype") and not value.startswith(prefixes):
            return c.out("B3.unknown", fact)
        if value.startswith("fp8") and "per_token" not in value and gpu is not None and gpu.sm < 89:
            return c.out("B3.fp8_storage", fact, gpu=gpu.name)
        return c.out("B3.set", fact)
    estimate, length = c.estimate, c.max_len
    if gpu is not None and gpu.sm >= 89 and estimate is not None and length is not None and not c.hybrid:
        sequences = estimate.sequences(length)
        if sequences is not None and sequences < 2:
            return c.out("B3.tight", c.fact("max_model_len") or c.unit.site)
    return c.out("B3.off")


def backend(c: Context) -> str | None:
    """The pinned attention backend, whichever way it is given."""
    config = c.mapping("attention_config").get("backend")
    value = c.text("attention_backend") or (config if isinstance(config, str) else None)
    return value.upper() if value else None


@check("B4")
def swap_space(c: Context) -> Outcome:
    fact = c.fact("swap_space")
    if fact is None:
        return c.out("B4.ok")
    release = c.since(
        "swap_space_llm_gone" if c.unit.launcher in ("LLM", "engine") else "swap_space_cli_gone"
    )
    if c.gone(release):
        return c.out("B4.gone", fact, gone=release, edits=[Edit("swap_space", None)])
    return c.out("B4.going", fact)


@check("B5")
def kv_offload(c: Context) -> Outcome:
    size = c.fact("kv_offloading_size")
    transfer = c.fact("kv_transfer_config")
    keys = c.mapping("kv_transfer_config")
    connector = keys.get("kv_connector")
    if (
        isinstance(connector, str)
        and connector not in names.choices("kv_connector")
        and not keys.get("kv_connector_module_path")
        and connector != "<unknown>"
    ):
        return c.out("B5.unknown", transfer, connector=connector)
    if connector == "OffloadingConnector" and size is None:
        extra = keys.get("kv_connector_extra_config")
        if not (isinstance(extra, dict) and any("size" in k or "bytes" in k or "num_" in k for k in extra)):
            return c.out("B5.no_size", transfer)
    if size is not None or transfer is not None:
        return c.out("B5.set", size or transfer)
    prefix = c.fact("enable_prefix_caching")
    repeated = c.fact("enable_auto_tool_choice") or (
        prefix
        if c.flag("enable_prefix_caching") and prefix is not None and prefix.state is State.LITERAL
        else None
    )
    ram = c.hardware.ram_gib
    if repeated is not None and ram is not None and ram >= _HOST_GIB_FOR_OFFLOAD and not c.rlhf:
        return c.out("B5.worth", repeated, ram=f"{ram:g}")
    return c.out("B5.off")


@check("B6")
def block_size(c: Context) -> Outcome:
    override = c.fact("num_gpu_blocks_override")
    if override is not None and not _is_test(c.unit.site.file):
        return c.out("B6.override", override, edits=[Edit("num_gpu_blocks_override", None)])
    fact = c.fact("block_size")
    if fact is not None and fact.known:
        if number(fact.value) == _BASE_BLOCK:
            return c.out("B6.same", fact)
        return c.out("B6.set", fact)
    return c.out("B6.ok", fact)


def _is_test(file: str) -> bool:
    parts = file.lower().split("/")
    return any(p in ("test", "tests", "testing", "ci", ".ci") or p.startswith("test_") for p in parts)
