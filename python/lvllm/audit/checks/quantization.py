"""D. Quantization."""

from __future__ import annotations

from lvllm.audit import capacity, names
from lvllm.audit.checks.context import Context, Edit, Outcome
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact, Site, Value
from lvllm.audit.hardware import Gpu

_AWQ = ("awq", "awq_marlin", "auto_awq")
_GPTQ = ("gptq", "gptq_marlin", "auto_gptq")
_LAYER_KEYS = ("linear", "moe")


def method(c: Context) -> tuple[Fact | None, str | None]:
    fact = c.fact("quantization")
    value = c.text("quantization")
    return fact, value.lower() if value else None


def online_scheme(gpu: Gpu | None) -> str:
    """The online FP8 scheme for a GPU."""
    return "fp8_per_tensor" if gpu is not None and gpu.arch == "Ada" else "fp8_per_block"


@check("D1")
def online_fp8(c: Context) -> Outcome:
    fact, value = method(c)
    gpu = c.hardware.gpu
    config = c.fact("quantization_config")
    online = names.choices("quantization_online")
    named_online = value in online and not (value == "mxfp4" and c.quantized == "mxfp4")
    if fact is not None and named_online and c.quantized is not None:
        return c.out("D1.already_quantized", fact, c.fact("model"), kind=c.quantized,
                     edits=[Edit("quantization", None)])  # fmt: skip
    if value == "fp8" and c.model is not None and c.model.known and c.quantized is None:
        return c.out("D1.plain_fp8", fact, online=online_scheme(gpu))
    if (
        gpu is not None
        and gpu.fp8
        and value is None
        and config is None
        and c.model is not None
        and c.model.known
        and c.quantized is None
        and not c.hybrid
        and not c.rlhf
    ):
        reason = _memory_reason(c)
        if reason is not None:
            scheme = online_scheme(gpu)
            edits = [Edit("quantization", scheme)] if c.command_line else []
            return c.out("D1.worth", c.fact("model"), gpu=gpu.name, reason=reason, online=scheme, edits=edits)
    if gpu is not None and not gpu.fp8 and value is not None and value.startswith("fp8"):
        return c.out("D1.weight_only", fact, gpu=gpu.name)
    if named_online or value == "fp8" or config is not None:
        return c.out("D1.set", fact or config)
    return c.out("D1.gpu_unknown" if gpu is None else "D1.off")


def _memory_reason(c: Context) -> str | None:
    estimate = c.estimate
    length = c.max_len
    if estimate is not None and length is not None:
        sequences = estimate.sequences(length)
        if sequences is None or sequences < 2:
            return "@tight"
    return "@goal_throughput" if c.goal == "throughput" else None


def _checkpoint(
    c: Context, item: str, kinds: tuple[str, ...], methods: tuple[str, ...], label: str
) -> Outcome | None:
    """The rows that AWQ and GPTQ share."""
    fact, value = method(c)
    gpu = c.hardware.gpu
    mine = c.quantized in kinds
    if mine:
        if gpu is not None and gpu.sm < 75:
            return c.out(f"{item}.too_old", fact or c.fact("model"), gpu=gpu.name, sm=f"{gpu.sm / 10:.1f}")
        dtype = c.text("dtype")
        if dtype in ("float16", "half") and (gpu is None or gpu.sm >= 80):
            return c.out(f"{item}.half", c.fact("dtype"), edits=[Edit("dtype", None)])
    if (
        value in methods
        and not mine
        and c.model is not None
        and c.model.known
        and (c.model.source == "config.json" or c.quantized is not None or _names_no_format(c))
    ):
        return c.out(f"{item}.not_{label}", fact, c.fact("model"))
    return None


def _names_no_format(c: Context) -> bool:
    """A hub name of a known family without any format in it: a 16-bit checkpoint."""
    name = c.text("model") or ""
    return (
        "/" in name and not name.startswith(("/", ".", "~")) and c.model is not None and bool(c.model.family)
    )


@check("D2")
def awq(c: Context) -> Outcome:
    found = _checkpoint(c, "D2", ("awq",), _AWQ, "awq")
    if found is not None:
        return found
    if c.quantized == "awq" or method(c)[1] in _AWQ:
        return c.out("D2.used", c.fact("model"))
    gpu, model = c.hardware.gpu, c.model
    if gpu is not None and model is not None and not gpu.fp8 and c.quantized is None and not c.hybrid:
        estimate = capacity.estimate(model, gpu.gib, c.fraction, tp=c.tp, pp=c.pp)
        if estimate is not None and estimate.pool_gib < 0 and method(c)[1] is None:
            return c.out("D2.choose", c.fact("model"), gpu=gpu.name)
    return c.out("D2.none")


@check("D3")
def gptq(c: Context) -> Outcome:
    found = _checkpoint(c, "D3", ("gptq", "gptq8"), _GPTQ, "gptq")
    if found is not None:
        return found
    gpu = c.hardware.gpu
    if c.quantized == "gptq8" and gpu is not None and gpu.arch == "Hopper":
        return c.out("D3.eight_bit", c.fact("model"))
    if c.quantized in ("gptq", "gptq8") or method(c)[1] in _GPTQ:
        return c.out("D3.used", c.fact("model"))
    return c.out("D3.none")


@check("D4")
def removed_method(c: Context) -> Outcome:
    fact, value = method(c)
    removed = names.removed("quantization")
    for place, name in _named_methods(c, fact, value):
        if name in removed:
            row = removed[name]
            rule = "D4.gone" if c.gone(row["gone"]) else "D4.going"
            use = row["use"] or "@release_format"
            return c.out(rule, place, method=name, gone=row["gone"], use=use)
    if value is not None and value not in ("none", "null"):
        if value in names.choices("quantization_deprecated") and not c.flag("allow_deprecated_quantization"):
            return c.out("D4.deprecated", fact, method=value)
        if value not in names.choices("quantization") and not c.has("io_processor_plugin"):
            return c.out("D4.unknown", fact, method=value)
    return c.out("D4.ok")


def _named_methods(c: Context, fact: Fact | None, value: str | None) -> list[tuple[Fact | Site, str]]:
    """Every place that selects a method: the option, the load format, the checkpoint itself."""
    found: list[tuple[Fact | Site, str]] = []
    if fact is not None and value is not None:
        found.append((fact, value))
    load = c.fact("load_format")
    if load is not None and load.known and isinstance(load.value, str):
        found.append((load, load.value.lower()))
    model = c.fact("model")
    if model is not None and isinstance(model.value, str):
        if model.value.lower().endswith(".gguf") or c.quantized == "gguf":
            found.append((model, "gguf"))
        elif c.quantized == "bitsandbytes" and (c.colocate or value is None):
            found.append((model, "bitsandbytes"))
    return found


@check("D5")
def kernel_choice(c: Context) -> Outcome:
    for name, row in sorted(names.removed("environment").items()):
        found = c.env(name)
        if row.get("owner") == "D5" and found is not None and c.gone(row["gone"]):
            return c.out("D5.env_gone", found, edits=[Edit(name, None, env=True)])
    fact = c.fact("moe_backend")
    value = c.text("moe_backend")
    gpu = c.hardware.gpu
    if fact is not None and value is not None:
        table = names.table("options")
        backend = value.lower().replace("-", "_")
        if backend not in names.choices("moe_backend"):
            return c.out("D5.unknown", fact, edits=[Edit("moe_backend", None)])
        floor = table["moe_sm"].get(backend)
        if gpu is not None and (
            (floor is not None and gpu.sm < floor) or backend in table["moe_never_cuda"]["names"]
        ):
            return c.out("D5.impossible", fact, gpu=gpu.name, edits=[Edit("moe_backend", None)])
        return c.out("D5.ok", fact)
    if method(c)[0] is None and c.quantized is None and not c.has("linear_backend"):
        return c.out("D5.nothing")
    return c.out("D5.ok")


@check("D6")
def by_layer(c: Context) -> Outcome:
    fact = c.fact("quantization_config")
    config = c.mapping("quantization_config")
    if fact is not None and config:
        if "targets" in config and any(k in config for k in _LAYER_KEYS):
            return c.out("D6.exclusive", fact)
        for scheme in _schemes(config):
            if scheme not in names.choices("quantization_config_names") and scheme != "<unknown>":
                return c.out("D6.unknown", fact, scheme=scheme)
        return c.out("D6.valid", fact)
    if c.moe and method(c)[1] in names.choices("quantization_online"):
        return c.out("D6.one_value", c.fact("quantization"))
    return c.out("D6.off" if c.moe else "D6.dense")


def _schemes(config: dict[str, Value]) -> list[str]:
    """Bare scheme names of a quantization_config."""
    found = [config[k] for k in _LAYER_KEYS if isinstance(config.get(k), str)]
    targets = config.get("targets")
    if isinstance(targets, dict):
        found += [v for v in targets.values() if isinstance(v, str)]
    return [str(f) for f in found]
