"""J. Environment."""

from __future__ import annotations

from collections.abc import Sequence

from lvllm.audit import modes, names
from lvllm.audit.checks.context import RECOMMENDED, Context, Outcome
from lvllm.audit.checks.hybrid_host import thread_count
from lvllm.audit.checks.registry import advisory, check
from lvllm.audit.checks.serving import cores_needed
from lvllm.audit.values import number

_LONG_PROMPTS = 65_536


@check("J1")
def fast_tokenizer(c: Context) -> Outcome:
    fact = c.env("VLLM_USE_FASTOKENS")
    if fact is not None and c.env_flag("VLLM_USE_FASTOKENS"):
        if c.version.below(c.since("fastokens")):
            return c.out("J1.ignored", fact, c.version.site)
        if not any(d.name == "fastokens" for d in c.project.dependencies):
            return c.out("J1.no_package", fact)
        return c.out("J1.on", fact)
    rate, length = c.hint("high_rate"), c.fact("max_model_len")
    long_prompts = length is not None and (c.num("max_model_len") or 0) >= _LONG_PROMPTS
    if (
        c.serve
        and (rate is not None or long_prompts)
        and not c.hybrid
        and not c.version.below(c.since("fastokens"))
    ):
        return c.out("J1.worth", rate or length)
    return c.out("J1.off")


@check("J2")
def cpu_cores(c: Context) -> Outcome:
    cores = c.hardware.cores
    if cores is None:
        return c.out("J2.unknown")
    available = cores
    threads = number(c.env_text("LK_THREADS"))
    if c.hybrid and threads is not None:
        judged = thread_count(c)
        if judged.status == RECOMMENDED:
            return c.out("J2.see_k2", judged.evidence[0] if judged.evidence else None)
        # K2 found the count right: the engine's threads park while the other processes run.
    need = cores_needed(c)
    evidence = c.unit.resources.cpus or c.unit.resources.cpuset or c.unit.site
    if available < need / 2:
        return c.out("J2.half", evidence, cores=f"{available:g}", need=need)
    if available < need:
        return c.out("J2.few", evidence, cores=f"{available:g}", need=need)
    return c.out("J2.ok", evidence, cores=f"{available:g}", need=need)


@check("J3")
def start_method(c: Context) -> Outcome:
    fact = c.env("VLLM_WORKER_MULTIPROC_METHOD")
    value = c.env_text("VLLM_WORKER_MULTIPROC_METHOD")
    if fact is not None and value is not None:
        if value not in names.choices("multiproc_method"):
            return c.out("J3.invalid", fact)
        early = c.unit.hints.get("cuda_before")
        if value == "fork" and early is not None:
            return c.out("J3.cuda_first", fact, early)
        if value == "spawn" and c.unit.main_guard is False and c.tp > 1:
            return c.out("J3.no_guard", fact, c.unit.site, tp=c.tp)
    return c.out("J3.ok", fact)


@check("J4")
def development_endpoints(c: Context) -> Outcome:
    if not c.unit.serves:
        return c.out("J4.not_serve")
    fact = c.env("VLLM_SERVER_DEV_MODE")
    on = c.env_flag("VLLM_SERVER_DEV_MODE") is True
    own_server = c.unit.launcher in ("trl vllm-serve", "swift rollout")
    if c.mode == modes.SERVER and fact is None and not own_server and _control_calls(c):
        return c.out("J4.needed", c.unit.site)
    if on and c.mode != modes.SERVER:
        if c.exposed() is not None and not c.protected():
            return c.out("J4.exposed", fact, c.exposed())
        return c.out("J4.not_needed", fact)
    return c.out("J4.ok", fact)


def _control_calls(c: Context) -> bool:
    """A trainer whose framework, or own code, uses the HTTP control calls."""
    if any(u is not c.unit for u in c.project.trainers):
        return True
    control = ("http:/update_weights", "http:/sleep", "http:/wake_up", "http:/collective_rpc",
               "http:/start_weight_update", "http:/init_weight_transfer_engine", "http:/pause")  # fmt: skip
    return any(f.name in control for f in c.project.calls)


@advisory
def long_context(c: Context) -> Sequence[Outcome]:
    """J5."""
    if c.env_flag("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        return [c.out("J5.set", c.env("VLLM_ALLOW_LONG_MAX_MODEL_LEN"))]
    return []


@advisory
def preemption(c: Context) -> Sequence[Outcome]:
    """J6."""
    if c.mode == modes.SERVE and c.hint("metrics") is None and not c.unit.documentation:
        return [c.out("J6.watch", c.unit.site)]
    return []
