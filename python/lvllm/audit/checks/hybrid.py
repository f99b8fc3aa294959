"""K. Hybrid CPU/GPU MoE: switch, prefill, resident layers, graphs, batch, competing options, names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

from lvllm.audit import names
from lvllm.audit.checks import flagtable
from lvllm.audit.checks.advisories import near_hybrid
from lvllm.audit.checks.context import Context, Edit, Outcome, each, show
from lvllm.audit.checks.registry import Check, advisory, check
from lvllm.audit.values import index_ranges, number

THRESHOLD = "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE"
WINDOW = "LVLLM_GPU_PREFETCH_WINDOW"
RESIDENT = "LVLLM_GPU_RESIDENT_MOE_LAYERS"
_FREE_SHARE = 0.15


def hybrid_only(item: str) -> Callable[[Check], Check]:
    """The item does not apply to a unit that is not hybrid."""

    def wrap(function: Check) -> Check:
        @wraps(function)
        def inner(c: Context) -> Outcome:
            return function(c) if c.hybrid else c.out(f"{item}.not_hybrid")

        return inner

    return wrap


@check("K1")
def master_switch(c: Context) -> Outcome:
    reading = flagtable.read(c, flagtable.SWITCH)
    if reading.error is not None:
        return c.out("K1.invalid", reading.fact, detail=reading.error)
    if flagtable.switch_on(c):
        if c.moe is False and c.model is not None and c.model.known:
            return c.out("K1.dense", reading.fact, c.fact("model"))
        return c.out("K1.on", reading.fact)
    if reading.fact is not None and not reading.fact.known:
        return c.out("K1.on", reading.fact)
    others = [f for f in flagtable.hybrid_facts(c) if f.name != flagtable.SWITCH]
    if others:
        shown = ", ".join(f.name for f in others[:4]) + (", …" if len(others) > 4 else "")
        edits = [Edit(flagtable.SWITCH, "1", env=True)]
        return c.out("K1.ignored", *others[:4], reading.fact, names=shown, edits=edits)
    if fits_host_only(c):
        model, ram = c.model, c.hardware.ram_gib
        assert model is not None
        return c.out("K1.too_big", c.fact("model"), weights=f"{model.weights_gib or 0:.0f}",
                     experts=f"{model.expert_gib or 0:.0f}", ram=f"{ram or 0:g}")  # fmt: skip
    return c.out("K1.off")


def fits_host_only(c: Context) -> bool:
    """A MoE model that does not fit the GPUs and whose experts fit host memory."""
    model, ram, gib = c.model, c.hardware.ram_gib, c.hardware.gib
    if model is None or not model.moe or ram is None or gib is None:
        return False
    weights, experts = model.weights_gib, model.expert_gib
    if weights is None or experts is None:
        return False
    gpus = max(c.hardware.count or 1, c.tp * c.pp)
    return weights > gpus * gib * c.fraction and experts * 1.15 <= ram


@check("K6")
@hybrid_only("K6")
def prefill_threshold(c: Context) -> Outcome:
    reading = flagtable.read(c, THRESHOLD)
    if reading.error is not None:
        return c.out("K6.invalid", reading.fact, detail=reading.error)
    if reading.unset or reading.value is None:
        return c.out("K6.ok", reading.fact, value="auto")
    budget, fact = c.token_budget, c.fact("max_num_batched_tokens")
    value = int(reading.value)
    if value == 0:
        if budget is not None and budget > 8192 and fact is not None:
            return c.out("K6.off_big_budget", fact, reading.fact, budget=int(budget))
        return c.out("K6.off", reading.fact)
    if budget is not None and value > budget:
        return c.out("K6.never", reading.fact, fact, budget=int(budget))
    if value < 512:
        return c.out("K6.too_small", reading.fact)
    if budget is not None and budget < 2 * value:
        return c.out("K6.small_budget", reading.fact, fact, budget=int(budget))
    return c.out("K6.ok", reading.fact, value=value)


@check("K7")
@hybrid_only("K7")
def prefetch_window(c: Context) -> Outcome:
    reading = flagtable.read(c, WINDOW)
    if reading.error is not None:
        return c.out("K7.invalid", reading.fact, detail=reading.error)
    if reading.unset:
        return c.out("K7.unset")
    if reading.value is not None and reading.value > 2:
        return c.out("K7.large", reading.fact)
    if flagtable.read(c, THRESHOLD).value == 0:
        return c.out("K7.no_prefill", reading.fact)
    return c.out("K7.ok", reading.fact)


@check("K8")
@hybrid_only("K8")
def resident_layers(c: Context) -> Outcome:
    reading = flagtable.read(c, RESIDENT)
    if reading.error is not None:
        return c.out("K8.invalid", reading.fact, detail=reading.error)
    if reading.fact is not None and reading.fact.known:
        found = _layer_numbers(c, reading)
        if found is not None:
            return found
        clean = _overlap(str(reading.fact.value))
        if clean is not None:
            return c.out("K8.overlap", reading.fact, clean=clean)
        return c.out("K8.ok", reading.fact)
    fit = _room(c)
    if reading.unset and fit is not None:
        free, layers, first = fit
        last = first + layers - 1
        return c.out("K8.room", c.unit.site, free=f"{free:.0f}", fit=layers,
                     range=f"{first}-{last}" if layers > 1 else str(first))  # fmt: skip
    return c.out("K8.ok", reading.fact)


def _layer_numbers(c: Context, reading: flagtable.Reading) -> Outcome | None:
    """Numbers that the model does not have, or that name dense layers."""
    model, spec = c.model, reading.value
    if model is None or model.layers is None:
        return None
    numbers = sorted(spec.main | spec.bare)
    first = model.dense_layers or 0
    above = [n for n in numbers if n >= model.layers]
    if above and model.mtp is False and model.source == "config.json":
        return c.out("K8.beyond", reading.fact, layer=above[0], layers=model.layers)
    named_main = [n for n in sorted(spec.main) if n >= model.layers]
    outside = named_main or (above if model.mtp is False else []) or [n for n in numbers if n < first]
    if outside:
        return c.out("K8.outside", reading.fact, layer=outside[0], first=first, last=model.layers - 1)
    return None


def _overlap(text: str) -> str | None:
    """The list without overlaps, if its ranges of one part overlap."""
    part, kept, overlap = "", {}, False
    order: list[str] = []
    for piece in text.split(","):
        prefix, colon, rest = piece.rpartition(":")
        part = prefix.strip().lower() if colon else part
        ranges = index_ranges(rest.strip())
        if ranges is None:
            continue
        if part not in kept:
            kept[part] = set[int]()
            order.append(part)
        for low, high in ranges:
            span = set(range(low, high + 1))
            overlap |= bool(span & kept[part])
            kept[part] |= span
    if not overlap:
        return None
    return ",".join(f"{p}:{_runs(kept[p])}" if p else _runs(kept[p]) for p in order)


def _runs(numbers: set[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _room(c: Context) -> tuple[float, int, int] | None:
    """(GiB free per GPU beside weights and the asked KV cache, layers that fit, first MoE layer)."""
    model, gib, estimate = c.model, c.hardware.gib, c.estimate
    if model is None or gib is None or estimate is None or model.layers is None or model.expert_gib is None:
        return None
    length, seqs = c.max_len, c.num("max_num_seqs")
    if estimate.bytes_per_token is None or length is None or seqs is None:
        return None
    free = estimate.pool_gib - seqs * length * estimate.bytes_per_token / 2**30
    first = model.dense_layers or 0
    layer = model.expert_gib / max(1, model.layers - first) / max(1, c.tp * c.pp)
    layers = min(int(free / layer), model.layers - first) if layer > 0 else 0
    return (free, layers, first) if free >= _FREE_SHARE * gib and layers >= 1 else None


@check("K9")
@hybrid_only("K9")
def graph_mode(c: Context) -> Outcome:
    eager = c.fact("enforce_eager")
    if eager is not None and c.flag("enforce_eager"):
        return c.out("K9.eager", eager, name="enforce_eager", edits=[Edit("enforce_eager", None)])
    level = c.fact("optimization_level")
    if level is not None and number(level.value) == 0:
        return c.out("K9.eager", level, name="-O0", edits=[Edit("optimization_level", None)])
    mode = c.compilation("cudagraph_mode")
    fact = c.fact("compilation_config")
    if isinstance(mode, str) and mode.upper() == "NONE":
        return c.out("K9.none", fact)
    if isinstance(mode, str) and mode.upper() == "PIECEWISE":
        return c.out("K9.piecewise", fact)
    return c.out("K9.ok", fact)


@check("K12")
@hybrid_only("K12")
def decode_batch(c: Context) -> Outcome:
    fact = c.fact("max_num_seqs")
    if fact is None:
        return c.out("K12.unset", c.unit.site)
    value = c.num("max_num_seqs")
    if value is not None and value > 16:
        return c.out("K12.large", fact)
    if c.fraction < 0.9 and c.has("gpu_memory_utilization"):
        return c.out("K12.fraction", c.fact("gpu_memory_utilization"))
    return c.out("K12.ok", fact)


@check("K13")
@hybrid_only("K13")
def competing_offload(c: Context) -> Outcome:
    for fact in each(c, "cpu_offload_gb", "offload_group_size", "offload_backend"):
        value = number(fact.value)
        active = value is None or value > 0
        if fact.name == "offload_backend":
            active = str(fact.value).lower() not in ("auto", "none")
        if active and fact.known:
            return c.out("K13.offload", fact, name=fact.written or fact.name, edits=[Edit(fact.name, None)])
    if c.flag("enable_eplb"):
        return c.out("K13.eplb", c.fact("enable_eplb"), edits=[Edit("enable_eplb", None)])
    if c.flag("enable_dbo"):
        return c.out("K13.dbo", c.fact("enable_dbo"), edits=[Edit("enable_dbo", None)])
    ways = c.tp * c.dp * c.size("prefill_context_parallel_size")
    experts = c.model.experts if c.model is not None else None
    if c.flag("enable_expert_parallel") and experts is not None and experts % ways:
        return c.out("K13.ep_uneven", c.fact("enable_expert_parallel"), experts=experts, ways=ways)
    if c.flag("enable_sleep_mode"):
        return c.out("K13.sleep", c.fact("enable_sleep_mode"))
    return c.out("K13.ok")


@check("K14")
@hybrid_only("K14")
def outdated_names(c: Context) -> Outcome:
    fork = _fork(c)
    if fork is not None:
        return fork
    strict = c.flag("fail_on_environ_validation") is True
    for name, row in sorted(names.removed("environment").items()):
        fact = c.unit.env.get(name)
        if row.get("owner") == "K14" and fact is not None:
            edits = [Edit(name, None, env=True)]
            return c.out("K14.refused" if strict else "K14.unknown", fact, name=name, edits=edits)
    for name, why in sorted(flagtable.no_effect().items()):
        fact = c.unit.env.get(name)
        if fact is not None:
            return c.out("K14.no_effect", fact, name=name, why=why, edits=[Edit(name, None, env=True)])
    return c.out("K14.ok")


def _fork(c: Context) -> Outcome | None:
    """A distribution that replaces vLLM itself, next to this package."""
    dependencies = c.project.dependencies
    ours = [d for d in dependencies if d.name == "lvllm"]
    wheel = next((d for d in dependencies if d.name == "vllm" and d.kind == "url"), None)
    old = next(
        (d for d in ours if d.kind in ("pin", "lock") and d.version.startswith(("0.", "1.", "2."))), None
    )
    if wheel is not None and ours:
        return c.out("K14.fork", wheel.site, ours[0].site, name=wheel.version)
    if old is not None and any(d.name == "vllm" for d in dependencies):
        return c.out("K14.fork", old.site, name=f"lvllm {old.version}")
    return None


@advisory
def unknown_hybrid_names(c: Context) -> Sequence[Outcome]:
    """Unknown ``LVLLM_*`` / ``LK_*`` names: the engine refuses to start with them."""
    known = flagtable.known_names()
    on = flagtable.switch_on(c)
    found = []
    for fact in flagtable.hybrid_facts(c):
        if fact.name not in known and not _own_variable(c, fact.name):
            rule = "X3.hybrid_refused" if on else "X3.hybrid_unknown"
            found.append(
                c.out(rule, fact, name=fact.name, near=near_hybrid(fact.name, known), value=show(fact))
            )
    return found


@advisory
def engine_notices(c: Context) -> Sequence[Outcome]:
    """X8: what the engine itself would say about settings that cannot have an effect."""
    if not c.hybrid or not flagtable.switch_on(c):
        return []
    return [c.out("X8.notice", fact or c.unit.site, detail=text) for text, fact in flagtable.notices(c)]


def _own_variable(c: Context, name: str) -> bool:
    launch = c.unit.launch
    exported = c.unit.env[name].origin
    used = launch is not None and any(f"${name}" in w.raw or f"${{{name}" in w.raw for w in launch.words)
    return used and exported != "inline"
