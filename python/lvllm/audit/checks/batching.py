"""E. Scheduling and batching."""

from __future__ import annotations

import re

from lvllm.audit import modes, names
from lvllm.audit.checks.context import Context, Edit, Outcome, each
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact
from lvllm.audit.values import number

_POOLING_TASKS = ("embed", "classify", "score", "reward", "token_embed", "token_classify", "pooling")


def pooling(c: Context) -> bool:
    """A model that returns no text."""
    runner = c.text("runner") or c.text("task")
    return bool(c.model is not None and c.model.pooling) or runner in _POOLING_TASKS


@check("E1")
def chunked_prefill(c: Context) -> Outcome:
    fact = c.fact("enable_chunked_prefill")
    if pooling(c):
        return c.out("E1.pooling")
    if c.flag("enable_chunked_prefill") is False and fact is not None:
        budget, length = c.num("max_num_batched_tokens"), c.max_len
        edits = [Edit("enable_chunked_prefill", None)]
        if budget is not None and length is not None and budget < length:
            return c.out("E1.start_error", fact, c.fact("max_num_batched_tokens"), c.fact("max_model_len"),
                         budget=int(budget), length=int(length), edits=edits)  # fmt: skip
        return c.out("E1.off", fact, edits=edits)
    return c.out("E1.ok", fact)


@check("E2")
def token_budget(c: Context) -> Outcome:
    fact = c.fact("max_num_batched_tokens")
    budget = c.num("max_num_batched_tokens")
    if budget is not None:
        seqs = c.num("max_num_seqs")
        shown = int(budget)
        if seqs is not None and budget < seqs:
            return c.out("E2.below_seqs", fact, c.fact("max_num_seqs"), budget=shown, seqs=int(seqs))
        wants_throughput = c.goal == "throughput" or c.mode == modes.OFFLINE
        if wants_throughput and budget < 8192 and not pooling(c):
            return c.out("E2.low", fact, budget=shown, edits=[Edit("max_num_batched_tokens", "8192")])
        if c.goal == "latency" and budget > 8192:
            return c.out("E2.high_latency", fact, budget=shown)
        if c.colocate and budget > 16384:
            return c.out("E2.high_colocate", fact, budget=shown)
        return c.out("E2.ok", fact)
    gpu = c.hardware.gpu
    default = c.budget("serve")
    if fact is None and gpu is not None and gpu.name == "A100" and c.serve and c.goal == "throughput":
        edits = [Edit("max_num_batched_tokens", "8192")] if c.command_line else []
        return c.out("E2.a100", c.unit.site, gpu=gpu.name, budget=default, edits=edits)
    return c.out("E2.ok", fact)


@check("E3")
def concurrency(c: Context) -> Outcome:
    if c.hybrid:
        return c.out("E3.hybrid")
    fact = c.fact("max_num_seqs")
    seqs = c.num("max_num_seqs")
    estimate, length = c.estimate, c.max_len
    if seqs is not None and estimate is not None and length is not None and estimate.tokens is not None:
        mean = length / 4
        if seqs * mean > estimate.tokens:
            return c.out("E3.too_many", fact, seqs=int(seqs), mean=int(mean), need=int(seqs * mean),
                         have=int(estimate.tokens), fit=max(1, int(estimate.tokens / mean)))  # fmt: skip
    if seqs is not None and seqs <= 8 and c.serve:
        return c.out("E3.too_few", fact, seqs=int(seqs))
    return c.out("E3.ok", fact)


@check("E4")
def prefix_caching(c: Context) -> Outcome:
    if pooling(c):
        return c.out("E4.pooling")
    fact = c.fact("enable_prefix_caching")
    off = c.flag("enable_prefix_caching") is False
    own = c.unit.framework is None and c.unit.launcher in ("LLM", "engine")
    updates = c.unit.called("update_weights", "reload_weights", "finish_weight_update")
    if (
        own
        and updates
        and not off
        and not c.unit.called("reset_prefix_cache", "http:/reset_prefix_cache")
        and c.unit.called("generate", "chat", "generate_async")
    ):
        return c.out("E4.stale", updates[0])
    if off and fact is not None and (c.serve or c.rlhf or _group_sampling(c)):
        return c.out("E4.off", fact, edits=[Edit("enable_prefix_caching", None)])
    return c.out("E4.ok", fact)


def _group_sampling(c: Context) -> bool:
    return any(s.name == "n" and (number(s.value) or 1) > 1 for s in c.unit.sampling)


@check("E5")
def long_prompts(c: Context) -> Outcome:
    for fact in each(c, "max_num_partial_prefills", "max_long_partial_prefills"):
        if c.gone(c.since("partial_prefills_gone")):
            both = [
                f for f in each(c, "max_num_partial_prefills", "max_long_partial_prefills") if f is not fact
            ]
            return c.out("E5.gone", fact, *both, edits=[Edit(f.name, None) for f in (fact, *both)])
    limit = c.fact("long_prefill_token_threshold")
    threshold, length = c.num("long_prefill_token_threshold"), c.max_len
    if threshold is not None and length is not None and threshold > length and c.has("max_model_len"):
        return c.out("E5.above_length", limit, c.fact("max_model_len"), length=int(length))
    if c.goal in ("latency", "throughput") and not c.has("performance_mode") and limit is None:
        mode = "interactivity" if c.goal == "latency" else "throughput"
        return c.out("E5.goal", c.unit.site, goal=c.goal, mode=mode)
    set_fact = limit or c.fact("performance_mode")
    return c.out("E5.set", set_fact) if set_fact is not None else c.out("E5.off")


@check("E6")
def async_scheduling(c: Context) -> Outcome:
    removed = names.removed("options")
    found = list(each(c, "num_scheduler_steps", "multi_step_stream_outputs", "scheduler_delay_factor"))
    if found:
        gone = [f for f in found if c.gone(removed[f.name]["gone"])]
        first = (gone or found)[0]
        row = removed[first.name]["gone"]
        if gone:
            return c.out("E6.gone", first, *gone[1:], gone=row, edits=[Edit(f.name, None) for f in gone])
        return c.out("E6.going", first, gone=row)
    fact = c.fact("async_scheduling")
    if fact is not None and c.flag("async_scheduling") is False and not _comment(c, fact):
        return c.out("E6.off", fact, edits=[Edit("async_scheduling", None)])
    custom = c.fact("scheduler_cls")
    if custom is not None:
        return c.out("E6.custom", custom)
    return c.out("E6.ok", fact)


def _comment(c: Context, fact: Fact) -> bool:
    """A comment on the line or the line above."""
    text = c.read(fact.site.file)
    if text is None:
        return False
    lines = text.splitlines()
    near = lines[max(0, fact.site.line - 2) : fact.site.line]
    return any(re.search(r"(^|\s)(#|//)\s*\w", line) for line in near)
