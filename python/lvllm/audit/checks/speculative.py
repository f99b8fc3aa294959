"""G. Speculative decoding."""

from __future__ import annotations

import json
import re

from lvllm.audit import modes, names
from lvllm.audit.checks.context import Context, Edit, Outcome, each
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact, Value
from lvllm.audit.model import Model, from_name
from lvllm.audit.values import number

_HEADS = ("eagle", "eagle3", "dflash", "dspark")
_MODEL_FREE = ("ngram", "ngram_gpu", "suffix")
_FLAT = ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min",
         "speculative_draft_tensor_parallel_size", "spec_decoding_acceptance_method")  # fmt: skip
_MTP = {"method": "mtp", "num_speculative_tokens": 1}


def config(c: Context) -> dict[str, Value]:
    """``speculative_config`` with the ``--spec-*`` options in it."""
    found = dict(c.mapping("speculative_config"))
    for option, key in (
        ("spec_method", "method"),
        ("spec_model", "model"),
        ("spec_tokens", "num_speculative_tokens"),
    ):
        value = c.value(option)
        if value is not None:
            found.setdefault(key, value)
    return found


def fact(c: Context) -> Fact | None:
    return next(each(c, "speculative_config", "spec_method", "spec_model", "spec_tokens"), None)


def method(c: Context) -> str | None:
    """The method in force; a model without a method is a draft model."""
    found = config(c)
    name = found.get("method")
    if isinstance(name, str):
        return name.lower()
    return "draft_model" if "model" in found else None


def _is_mtp(name: str | None) -> bool:
    return name is not None and (name == "mtp" or name.endswith("_mtp"))


def _target(c: Context) -> str:
    return (c.text("model") or "").rsplit("/", 1)[-1]


def generation(name: str) -> str | None:
    """The generation token of a checkpoint name, most specific first."""
    plain = re.sub(r"[-_ ]", "", name.lower())
    return next(
        (g for g in names.table("heads")["generations"]["names"] if g.replace("-", "") in plain), None
    )


@check("G1")
def draft_head(c: Context) -> Outcome:
    name, keys = method(c), config(c)
    if name in _HEADS:
        head = keys.get("model")
        if not head:
            return c.out("G1.no_model", fact(c), method=name)
        ours, theirs = generation(c.text("model") or ""), generation(str(head))
        if ours is not None and theirs is not None and ours != theirs:
            return c.out("G1.generation", fact(c), c.fact("model"), head=str(head), model=_target(c))
        return c.out("G1.valid", fact(c))
    if c.goal == "throughput":
        return c.out("G1.high_concurrency")
    if c.goal == "latency" and name is None and fact(c) is None:
        lower = (c.text("model") or "").lower()
        head_row = next((h for h in names.table("heads")["head"] if re.search(h["target"], lower)), None)
        if head_row is not None:
            return c.out("G1.worth", c.fact("model"), method=head_row["method"])
    return c.out("G1.off")


@check("G2")
def native_mtp(c: Context) -> Outcome:
    name, model = method(c), c.model
    if _is_mtp(name):
        exact = model is not None and model.known and model.mtp is False
        if exact:
            return c.out("G2.no_head", fact(c), c.fact("model"), model=_target(c))
        if name != "mtp":
            return c.out("G2.alias", fact(c), method=name)
        return c.out("G2.on", fact(c))
    few = c.num("max_num_seqs")
    wanted = c.goal == "latency" or (few is not None and few <= 16 and c.goal != "throughput")
    if model is not None and model.mtp is True and c.mode == modes.SERVE and wanted and fact(c) is None:
        edits = [Edit("speculative_config", json.dumps(_MTP))] if c.command_line else []
        return c.out("G2.worth", c.fact("model"), model=_target(c), config=json.dumps(_MTP), edits=edits)
    return c.out("G2.none")


@check("G3")
def small_draft(c: Context) -> Outcome:
    flat = list(each(c, *_FLAT))
    if flat:
        return c.out("G3.flat", *flat)
    name, keys, model = method(c), config(c), c.model
    if name == "draft_model":
        draft = from_name(str(keys.get("model") or ""))
        found = _draft(c, model, draft, keys)
        if found is not None:
            return found
    if name in _MODEL_FREE:
        hot = [s for s in c.unit.sampling if s.name == "temperature" and (number(s.value) or 0) >= 0.8]
        chat = c.unit.called("chat") and not c.unit.called("generate")
        if hot and chat and "repetitive" not in c.unit.hints:
            return c.out("G3.open_chat", hot[0], method=name)
    if name is not None and name in (*_MODEL_FREE, "draft_model", "custom_class"):
        return c.out("G3.set", fact(c), method=name)
    repetitive = c.unit.hints.get("repetitive")
    if name is None and fact(c) is None and repetitive is not None and not c.rlhf and c.goal != "throughput":
        return c.out("G3.repetitive", repetitive)
    return c.out("G3.off")


def _draft(c: Context, model: Model | None, draft: Model, keys: dict[str, Value]) -> Outcome | None:
    if model is not None and model.family and draft.family and not keys.get("use_heterogeneous_vocab"):
        ours, theirs = generation(model.name), generation(draft.name)
        if (
            ours is not None
            and theirs is not None
            and ours.partition("-")[0][:4] != theirs.partition("-")[0][:4]
        ):
            return c.out("G3.vocabulary", fact(c), c.fact("model"), draft=draft.name, model=_target(c))
    if model is not None and model.params_b and draft.params_b and draft.params_b > model.params_b / 5:
        return c.out("G3.large", fact(c), c.fact("model"), draft_b=f"{draft.params_b:g}",
                     target_b=f"{model.params_b:g}")  # fmt: skip
    return None


@check("G4")
def draft_settings(c: Context) -> Outcome:
    keys = config(c)
    if not keys:
        return c.out("G4.none")
    size = number(keys.get("draft_tensor_parallel_size"))
    if size is not None and size not in (1, c.tp) and c.sizes_known():
        return c.out("G4.tp", fact(c), c.fact("tensor_parallel_size"), draft_tp=int(size), tp=c.tp)
    if "tensor_parallel_size" in keys:
        return c.out("G4.wrong_key", fact(c))
    tokens = number(keys.get("num_speculative_tokens"))
    if tokens is not None and tokens > 8 and method(c) != "suffix":
        return c.out("G4.many", fact(c), tokens=int(tokens))
    return c.out("G4.ok", fact(c))
