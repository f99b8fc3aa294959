"""C. Parallelism."""

from __future__ import annotations

from lvllm.audit import capacity
from lvllm.audit.checks.context import Context, Edit, Outcome, each
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact

_MAX_TP = 16
_EXTERNAL = ("data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb")


def stated_gpus(c: Context) -> int | None:
    """The number of GPUs, unless it is only derived from the sizes themselves."""
    return c.hardware.count if c.hardware.count_source != "parallel sizes" else None


def nodes(c: Context) -> int:
    return c.size("nnodes")


@check("C1")
def tensor_parallel(c: Context) -> Outcome:
    fact = c.fact("tensor_parallel_size")
    tp = c.tp
    known = fact is None or c.num("tensor_parallel_size") is not None
    if not known:
        return c.out("C1.ok", fact)
    gpu, model, gpus = c.hardware.gpu, c.model, stated_gpus(c)
    estimate = c.estimate
    if (
        estimate is not None
        and gpu is not None
        and model is not None
        and estimate.pool_gib < 0
        and not c.hybrid
    ):
        return _does_not_fit(c, fact)
    if model is not None and model.heads is not None and model.heads % tp:
        return c.out("C1.heads", fact, heads=model.heads)
    if gpus is not None and tp > gpus * nodes(c):
        return c.out("C1.more_than_gpus", fact, _gpu_site(c), gpus=gpus)
    if gpu is not None and model is not None and model.moe is False and c.goal == "throughput":
        least = capacity.least_tp(model, gpu.gib, c.fraction, pp=c.pp)
        if least is not None and tp > 2 * least:
            return c.out("C1.over_split", fact, least=least)
    if gpu is not None and not gpu.nvlink and tp > 4:
        return c.out("C1.pcie", fact)
    if tp * c.pp * c.dp == 1 and (gpus or 1) == 1:
        return c.out("C1.one_gpu")
    return c.out("C1.ok", fact)


def _gpu_site(c: Context) -> Fact | None:
    return c.unit.env.get("CUDA_VISIBLE_DEVICES") or c.unit.resources.gpus


def _does_not_fit(c: Context, fact: Fact | None) -> Outcome:
    model, gpu = c.model, c.hardware.gpu
    assert model is not None
    assert gpu is not None
    weights = f"{model.weights_gib or 0:.0f}"
    evidence = fact or c.fact("model") or c.unit.site
    least = capacity.least_tp(model, gpu.gib, c.fraction, pp=c.pp, limit=_MAX_TP)
    if least is None:
        return c.out("C1.never_fits", evidence, weights=weights, gpu=gpu.name, limit=_MAX_TP)
    quantize = "" if model.quantized else "@or_quantized"
    return c.out("C1.does_not_fit", evidence, weights=weights, gpu=gpu.name, tp=c.tp, pp=c.pp, least=least,
                 gpus=c.tp * c.pp, quantize=quantize)  # fmt: skip


@check("C2")
def pipeline_parallel(c: Context) -> Outcome:
    fact = c.fact("pipeline_parallel_size")
    count = nodes(c)
    gpu = c.hardware.gpu
    if count > 1 and c.pp == 1 and c.tp > 8:
        return c.out(
            "C2.tp_spans_nodes", c.fact("nnodes"), c.fact("tensor_parallel_size"), tp=c.tp, nodes=count
        )
    if c.pp > 1 and count == 1 and gpu is not None and gpu.nvlink and c.model is not None:
        least = capacity.least_tp(c.model, gpu.gib, c.fraction)
        if least is not None and least <= 8:
            return c.out("C2.not_needed", fact)
    if c.pp == 1 and count == 1:
        return c.out("C2.single")
    return c.out("C2.ok", fact)


@check("C3")
def data_parallel(c: Context) -> Outcome:
    fact = c.fact("data_parallel_size")
    external = c.text("distributed_executor_backend") == "external_launcher"
    if c.unit.launcher == "LLM" and c.dp > 1 and not external:
        return c.out("C3.offline", fact)
    gpus = stated_gpus(c)
    used = c.tp * c.pp * c.dp
    if c.serve and gpus is not None and gpus >= 2 * used and c.sizes_known() and not _splits(c):
        dp = gpus // (c.tp * c.pp)
        edits = [Edit("data_parallel_size", str(dp))] if c.command_line else []
        return c.out("C3.idle", fact, _gpu_site(c), gpus=gpus, used=used, dp=dp, edits=edits)
    for option in each(c, *_EXTERNAL):
        if c.flag(option.name) and c.moe is False:
            return c.out("C3.external_dense", option)
    if c.dp > 1 or (fact is not None and not fact.known):
        return c.out("C3.set", fact)
    return c.out("C3.one_gpu" if (gpus or used) == 1 else "C3.off")


def _splits(c: Context) -> bool:
    """Ranks of this server that run elsewhere or by themselves."""
    return any(
        c.has(n) for n in ("data_parallel_rank", "data_parallel_size_local", "prefill_context_parallel_size")
    )


@check("C4")
def expert_parallel(c: Context) -> Outcome:
    fact = c.fact("enable_expert_parallel")
    on = c.flag("enable_expert_parallel") is True
    if c.hybrid:
        return c.out("C4.hybrid")
    if c.moe is None:
        return c.out("C4.on" if on else "C4.model_unknown", fact)
    if not c.moe:
        if on and c.model is not None and bool(c.model.layers or c.model.source == "config.json"):
            return c.out("C4.dense", fact, edits=[Edit("enable_expert_parallel", None)])
        return c.out("C4.not_moe")
    if c.dp > 1 and not on and (fact is None or fact.known):
        return c.out("C4.dp_without", c.fact("data_parallel_size"), dp=c.dp)
    if on and c.tp * c.dp == 1 and c.sizes_known():
        return c.out("C4.no_effect", fact, edits=[Edit("enable_expert_parallel", None)])
    gpus = c.hardware.count
    if not on and gpus is not None and gpus >= 8:
        return c.out(
            "C4.many_gpus", _gpu_site(c) or c.key("trainer.n_gpus_per_node") or c.unit.site, gpus=gpus
        )
    return c.out("C4.on" if on else "C4.off", fact)


@check("C5")
def size_arithmetic(c: Context) -> Outcome:
    detail = _contradiction(c)
    if detail is not None:
        contradicting = tuple(each(c, "data_parallel_size_local", "data_parallel_size", "nnodes", "node_rank",
                              "data_parallel_rank", "data_parallel_start_rank"))  # fmt: skip
        return c.out("C5.inconsistent", *contradicting, detail=detail)
    gpus = stated_gpus(c)
    if gpus is None or not c.sizes_known():
        return c.out("C5.unknown")
    local_dp = c.num("data_parallel_size_local")
    product = c.tp * c.pp * c.dp
    here = int(c.tp * c.pp * local_dp) if local_dp is not None else product
    if nodes(c) > 1 and local_dp is None:
        here = max(1, product // nodes(c))
    if "data_parallel_rank" in c.unit.settings:
        here = c.tp * c.pp
    evidence = (c.fact("tensor_parallel_size"), c.fact("data_parallel_size"), _gpu_site(c))
    if here > gpus:
        return c.out("C5.too_many", *evidence, product=here, gpus=gpus)
    # A framework starts as many engines as fit, or trains on the other GPUs.
    replicas = c.unit.framework is not None and gpus % here == 0
    if here < gpus and not replicas and c.unit.framework != "openrlhf":
        return c.out("C5.too_few", *evidence, product=here, gpus=gpus, idle=gpus - here)
    return c.out("C5.ok")


def _contradiction(c: Context) -> str | None:
    local, total = c.num("data_parallel_size_local"), c.num("data_parallel_size")
    if local is not None and total is not None and local > total:
        return f"data_parallel_size_local {local:g} > data_parallel_size {total:g}"
    count, rank = c.num("nnodes"), c.num("node_rank")
    if count is not None and rank is not None and rank >= count:
        return f"node_rank {rank:g} with nnodes {count:g}"
    for name in ("data_parallel_rank", "data_parallel_start_rank"):
        index = c.num(name)
        if index is not None and total is not None and index >= total:
            return f"{name} {index:g} with data_parallel_size {total:g}"
    return None
