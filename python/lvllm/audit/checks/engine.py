"""A. Engine and compilation."""

from __future__ import annotations

from lvllm.audit import names
from lvllm.audit.checks.context import Context, Edit, Outcome, each
from lvllm.audit.checks.registry import check
from lvllm.audit.values import number
from lvllm.audit.versions import minor_behind

_TIGHT_GIB = 2.0


@check("A1")
def optimization_level(c: Context) -> Outcome:
    fact = c.fact("optimization_level")
    if fact is None or not fact.known:
        return c.out("A1.ok", fact)
    level = number(fact.value)
    old = c.version.below(c.since("optimization_level"))
    if level in (0, 1) and not old and (c.serve or c.rlhf):
        return c.out("A1.debug", fact, edits=[Edit("optimization_level", None)])
    if old and (level == 3 or isinstance(fact.value, dict)):
        return c.out("A1.old_meaning", fact)
    return c.out("A1.ok", fact)


@check("A2")
def cuda_graphs(c: Context) -> Outcome:
    eager = c.fact("enforce_eager")
    if eager is not None and c.flag("enforce_eager") is True:
        if c.colocate:
            return c.out("A2.eager_colocate", eager)
        estimate = c.estimate
        if estimate is not None and estimate.pool_gib < _TIGHT_GIB:
            return c.out("A2.eager_tight", eager)
        return c.out("A2.eager", eager, edits=[Edit("enforce_eager", None)])
    if str(c.compilation("cudagraph_mode")).upper() == "NONE" and "cudagraph_mode" in c.mapping(
        "compilation_config"
    ):
        return c.out("A2.mode_none", c.fact("compilation_config"))
    return c.out("A2.ok", eager)


@check("A3")
def torch_compile(c: Context) -> Outcome:
    config = c.fact("compilation_config")
    keys = c.mapping("compilation_config")
    for key, row in names.removed("compilation").items():
        if key in keys and c.gone(row["gone"]):
            return c.out("A3.removed_key", config, key=key, gone=row["gone"], use=row["use"])
    for fact in each(c, "cuda_graph_sizes"):
        row = names.removed("options")["cuda_graph_sizes"]
        if c.gone(row["gone"]):
            return c.out("A3.removed_key", fact, key=fact.written, gone=row["gone"], use=row["use"])
    if config is not None and number(config.value) == 0:
        return c.out("A3.mode_none", config)
    if "mode" in keys and (number(keys["mode"]) == 0 or str(keys["mode"]).upper() == "NONE"):
        return c.out("A3.mode_none", config)
    if "level" in keys:
        return c.out("A3.level", config)
    if c.env_flag("TORCH_COMPILE_DISABLE"):
        return c.out("A3.torch_disabled", c.env("TORCH_COMPILE_DISABLE"))
    if c.serve and c.env_flag("VLLM_DISABLE_COMPILE_CACHE"):
        return c.out("A3.no_cache", c.env("VLLM_DISABLE_COMPILE_CACHE"))
    return c.out("A3.ok", config)


@check("A4")
def engine_generation(c: Context) -> Outcome:
    reference = names.reference()
    declared = c.version.text
    switch = c.env("VLLM_USE_V1")
    if c.version.below(c.since("v1_engine")) and c.version.exact:
        return c.out("A4.v0_release", c.version.site, declared=declared, reference=reference)
    if switch is not None and c.env_flag("VLLM_USE_V1") is False:
        ignored = c.gone(c.since("v1_only"))
        edits = [Edit("VLLM_USE_V1", None, env=True)] if ignored else []
        return c.out("A4.v1_off_ignored" if ignored else "A4.v1_off", switch, edits=edits)
    if switch is not None and c.env_flag("VLLM_USE_V1") is True and c.gone(c.since("v1_only")):
        note = c.out("A4.v1_on_note", switch, edits=[Edit("VLLM_USE_V1", None, env=True)])
        return c.out("A4.v1_on", switch, advisories=[note])
    behind = minor_behind(declared) if c.version.known and c.version.exact else 0
    if behind > int(c.since("behind_minor_releases")):
        return c.out("A4.far_behind", c.version.site, declared=declared, behind=behind, reference=reference)
    return c.out("A4.ok", c.version.site)


@check("A5")
def capture_budget(c: Context) -> Outcome:
    seqs_fact = c.fact("max_num_seqs")
    seqs = c.num("max_num_seqs")
    sizes_fact = c.fact("cudagraph_capture_sizes") or c.fact("max_cudagraph_capture_size")
    largest = _largest(c)
    if largest is not None:
        in_force = seqs if seqs_fact is not None else c.budget("seqs")
        if in_force is not None and largest < in_force:
            return c.out("A5.too_small", sizes_fact or c.fact("compilation_config"), seqs_fact,
                         largest=int(largest), seqs=int(in_force))  # fmt: skip
        return c.out("A5.explicit", sizes_fact or c.fact("compilation_config"))
    graphs_off = c.flag("enforce_eager") is True
    default_sizes = sizes_fact is None and "cudagraph_capture_sizes" not in c.mapping("compilation_config")
    small = seqs is not None and seqs <= 64
    if default_sizes and not graphs_off and small:
        edits = [Edit("max_cudagraph_capture_size", str(int(seqs or 0)))] if c.command_line else []
        return c.out("A5.cap", seqs_fact, edits=edits)
    if default_sizes and not graphs_off and c.colocate:
        return c.out("A5.cap", c.unit.site)
    return c.out("A5.ok", sizes_fact)


def _largest(c: Context) -> float | None:
    """The largest explicit capture size."""
    for source in (c.value("cudagraph_capture_sizes"), c.compilation("cudagraph_capture_sizes")):
        if isinstance(source, list):
            found = [n for n in map(number, source) if n is not None]
            if found:
                return max(found)
    explicit = c.num("max_cudagraph_capture_size")
    return explicit if explicit is not None else number(c.compilation("max_cudagraph_capture_size"))
