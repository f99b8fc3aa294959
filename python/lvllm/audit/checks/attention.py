"""F. Attention."""

from __future__ import annotations

from lvllm.audit import names
from lvllm.audit.checks.context import RECOMMENDED, Context, Edit, Outcome
from lvllm.audit.checks.memory import backend, kv_cache_type
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact
from lvllm.audit.hardware import Gpu
from lvllm.audit.values import number


def backend_fact(c: Context) -> Fact | None:
    if c.has("attention_backend"):
        return c.fact("attention_backend")
    return c.fact("attention_config") if "backend" in c.mapping("attention_config") else None


def _automatic_version(gpu: Gpu) -> int:
    if gpu.sm == 90:
        return 3
    return 4 if gpu.sm in (100, 103) else 2


@check("F1")
def flash_attention_version(c: Context) -> Outcome:
    variable = c.env("VLLM_FLASH_ATTN_VERSION")
    if variable is not None and c.gone(names.removed("environment")["VLLM_FLASH_ATTN_VERSION"]["gone"]):
        return c.out("F1.env", variable, edits=[Edit("VLLM_FLASH_ATTN_VERSION", None, env=True)])
    fact = c.fact("attention_config")
    version = number(c.mapping("attention_config").get("flash_attn_version"))
    gpu = c.hardware.gpu
    if version is not None and gpu is not None:
        shown = int(version)
        if (shown == 3 and gpu.sm != 90) or (shown == 4 and gpu.sm not in (90, 100, 103)):
            return c.out("F1.impossible", fact, version=shown, gpu=gpu.name)
        if shown == _automatic_version(gpu):
            return c.out("F1.same", fact, version=shown, gpu=gpu.name)
    return c.out("F1.ok", fact if version is not None else None)


@check("F2")
def attention_backend(c: Context) -> Outcome:
    variable = c.env("VLLM_ATTENTION_BACKEND")
    if variable is not None and c.gone(names.removed("environment")["VLLM_ATTENTION_BACKEND"]["gone"]):
        edits = [Edit("VLLM_ATTENTION_BACKEND", None, env=True)]
        if c.command_line and not backend(c) and variable.known:
            edits.append(Edit("attention_backend", str(variable.value)))
        return c.out("F2.env", variable, edits=edits)
    value, fact, gpu = backend(c), backend_fact(c), c.hardware.gpu
    if value is None:
        return c.out("F2.ok", fact)
    prefixes = tuple(names.choices("attention_backend_prefixes"))
    if value not in names.choices("attention_backend") and not value.startswith(prefixes):
        return c.out("F2.unknown", fact, value=value, edits=[Edit("attention_backend", None)])
    floor = names.table("options")["attention_sm"].get(value)
    if gpu is not None and floor is not None and gpu.sm < floor:
        return c.out("F2.capability", fact, value=value, need=f"{floor / 10:.1f}", gpu=gpu.name,
                     sm=f"{gpu.sm / 10:.1f}", edits=[Edit("attention_backend", None)])  # fmt: skip
    if gpu is not None and gpu.sm >= 80 and value in ("TRITON_ATTN", "FLEX_ATTENTION"):
        return c.out("F2.slow", fact, value=value, gpu=gpu.name, edits=[Edit("attention_backend", None)])
    return c.out("F2.ok", fact)


@check("F3")
def mla_backend(c: Context) -> Outcome:
    model = c.model
    if model is None or not model.any_mla:
        return c.out("F3.not_mla")
    value, fact, gpu = backend(c), backend_fact(c), c.hardware.gpu
    if value is not None and value in names.choices("attention_backend") and not _takes_mla(value):
        return c.out("F3.not_mla_backend", fact, value=value, model=model.name.rsplit("/", 1)[-1],
                     edits=[Edit("attention_backend", None)])  # fmt: skip
    if value is not None and gpu is not None:
        if value == "FLASHMLA" and (gpu.sm < 90 or gpu.sm >= 120):
            return c.out("F3.flashmla", fact, gpu=gpu.name, edits=[Edit("attention_backend", None)])
        if value == "CUTLASS_MLA" and gpu.sm not in (100, 103):
            return c.out("F3.cutlass", fact, gpu=gpu.name, edits=[Edit("attention_backend", None)])
    if c.env_flag("VLLM_MLA_DISABLE"):
        return c.out(
            "F3.disabled", c.env("VLLM_MLA_DISABLE"), edits=[Edit("VLLM_MLA_DISABLE", None, env=True)]
        )
    return c.out("F3.ok", fact)


def _takes_mla(value: str) -> bool:
    return "MLA" in value or "SPARSE" in value or "MSA" in value or value in ("CUSTOM", "B12X")


@check("F4")
def fp8_attention(c: Context) -> Outcome:
    fact, gpu = c.fact("kv_cache_dtype"), c.hardware.gpu
    kv = c.text("kv_cache_dtype") or ""
    value = backend(c)
    if kv.startswith("fp8"):
        if value == "FLASH_ATTN_MLA" or (value == "FLASH_ATTN" and kv == "fp8_e5m2"):
            return c.out("F4.refused", fact, backend_fact(c), backend=value, where="")
        if value == "FLASH_ATTN" and gpu is not None and gpu.sm not in (90, 100, 103):
            return c.out("F4.refused", fact, backend_fact(c), backend=value, where=f" ({gpu.name})")
        if gpu is not None and gpu.sm in (90, 100, 103):
            return c.out("F4.ok", fact)
        return c.out("F4.none")
    if gpu is not None and gpu.sm in (90, 100, 103) and kv_cache_type(c).status == RECOMMENDED:
        return c.out("F4.worth", c.fact("max_model_len"), gpu=gpu.name)
    return c.out("F4.none")
