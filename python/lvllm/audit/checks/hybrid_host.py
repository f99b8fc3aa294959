"""K. Hybrid CPU/GPU MoE: threads, NUMA, mixed GPUs, host memory."""

from __future__ import annotations

from lvllm.audit.checks import flagtable
from lvllm.audit.checks.context import Context, Edit, Outcome
from lvllm.audit.checks.hybrid import RESIDENT, hybrid_only
from lvllm.audit.checks.registry import check
from lvllm.audit.facts import Fact
from lvllm.audit.values import gib, index_ranges, number

THREADS = "LK_THREADS"
BINDING = "LK_THREAD_BINDING"
NODES = "LVLLM_NUMA_NODES"
INTERLEAVE = "LVLLM_ENABLE_NUMA_INTERLEAVE"
HOST = "LVLLM_HOST_GIB"
_SPARE = 1.15


def workers(c: Context) -> int:
    """GPU worker processes on one host."""
    return max(1, c.tp * c.pp * c.dp // c.size("nnodes"))


@check("K2")
@hybrid_only("K2")
def thread_count(c: Context) -> Outcome:
    reading = flagtable.read(c, THREADS)
    if reading.error is not None:
        return c.out("K2.invalid", reading.fact, detail=reading.error)
    if reading.unset or reading.value is None:
        return c.out("K2.auto", reading.fact)
    cores, count, threads = c.hardware.cores, workers(c), int(reading.value)
    if cores is None:
        return c.out("K2.unknown", reading.fact)
    share = cores / count
    found: dict[str, object] = {
        "threads": threads,
        "workers": count,
        "cores": f"{cores:g}",
        "best": max(1, int(share)),
    }
    edits = [Edit(THREADS, str(max(1, int(share))), env=True)]
    if threads * count > cores:
        logical = threads == int(2 * cores / count)
        return c.out("K2.logical" if logical else "K2.too_many", reading.fact, edits=edits, found=found)
    if abs(threads - share) <= 0.1 * share:
        return c.out("K2.good", reading.fact, found=found)
    if threads < share / 2:
        return c.out("K2.few", reading.fact, found=found)
    if c.hardware.smt is False and cores - threads * count < 2:
        return c.out("K2.none_left", reading.fact, found=found)
    return c.out("K2.ok", reading.fact, found=found)


@check("K3")
@hybrid_only("K3")
def openmp(c: Context) -> Outcome:
    for name, rule in (("OMP_NUM_THREADS", "K3.omp"), ("MKL_NUM_THREADS", "K3.blas"),
                       ("OPENBLAS_NUM_THREADS", "K3.blas")):  # fmt: skip
        fact = c.env(name)
        value = number(c.env_text(name))
        if fact is not None and value is not None and value > 1:
            return c.out(rule, fact, name=name, edits=[Edit(name, "1", env=True)])
    return c.out("K3.ok", c.env("OMP_NUM_THREADS"))


@check("K4")
@hybrid_only("K4")
def thread_binding(c: Context) -> Outcome:
    reading = flagtable.read(c, BINDING)
    if reading.error is not None:
        return c.out("K4.invalid", reading.fact, detail=reading.error)
    value = str(reading.value or "cpu_core").upper()
    if value == "CPU_CORE":
        why: tuple[str, Fact | None] | None = None
        if c.unit.resources.cpuset is not None:
            why = ("cpuset", c.unit.resources.cpuset)
        elif c.hardware.vm:
            why = ("virtual machine", None)
        elif _instances(c) and flagtable.read(c, NODES).unset:
            why = ("several instances on one host", None)
        if why is not None:
            edits = [Edit(BINDING, "NUMA_NODE", env=True)]
            return c.out("K4.use_node", reading.fact, why[1], c.unit.site, why=why[0], edits=edits)
    return c.out("K4.ok", reading.fact, value=value)


def _instances(c: Context) -> bool:
    """Another hybrid server in the same file."""
    return any(
        o.site.file == c.unit.site.file and o.site != c.unit.site and not o.documentation
        and any(n.startswith(flagtable.PREFIXES) for n in o.env)
        for o in c.neighbours
    )  # fmt: skip


@check("K5")
@hybrid_only("K5")
def numa_layout(c: Context) -> Outcome:
    for name in (NODES, INTERLEAVE):
        reading = flagtable.read(c, name)
        if reading.error is not None:
            return c.out("K5.invalid", reading.fact, name=name, detail=reading.error)
    bound = _bound_nodes(c)
    if bound is not None:
        found = _bound(c, *bound)
        if found is not None:
            return found
    if c.flag("numa_bind"):
        return c.out("K5.numa_bind", c.fact("numa_bind"), edits=[Edit("numa_bind", None)])
    nodes, gpus = c.hardware.numa_nodes, workers(c)
    if nodes is not None and gpus > 1 and nodes % gpus:
        return c.out("K5.uneven", c.unit.site, nodes=nodes, gpus=gpus)
    interleave = flagtable.read(c, INTERLEAVE)
    weights = c.model.weights_gib if c.model is not None else None
    if interleave.value is False and weights is not None and c.hardware.ram_gib:
        share = weights / c.hardware.ram_gib
        if share > 0.6:
            edits = [Edit(INTERLEAVE, "1", env=True)]
            return c.out("K5.no_interleave", interleave.fact, share=f"{100 * share:.0f}", edits=edits)
    resources = c.unit.resources
    nice = any(cap.upper().removeprefix("CAP_") in ("SYS_NICE", "ALL") for cap in resources.cap_add)
    if resources.container and not resources.privileged and not nice:
        return c.out("K5.container", c.unit.image or c.unit.site)
    return c.out("K5.ok")


def _bound_nodes(c: Context) -> tuple[Fact, str] | None:
    """(fact, node list) of a wrapper or service manager that restricts the nodes."""
    for key in ("numactl--cpunodebind", "numactl--membind", "numactl"):
        fact = c.key(key)
        if fact is not None:
            return fact, str(fact.value)
    policy = c.unit.resources.numa_policy
    return (policy, str(policy.value)) if policy is not None else None


def _bound(c: Context, fact: Fact, nodes: str) -> Outcome | None:
    ranges = index_ranges(nodes)
    bound = {n for a, b in ranges for n in range(a, b + 1)} if ranges else set()
    wanted = flagtable.read(c, NODES).value
    if wanted is not None and bound and set(wanted) == bound:
        return c.out("K5.same_nodes", fact)
    if len(bound) > 1:
        return None
    how = f"{fact.name} {fact.written}" if fact.name == "numactl" else fact.written or fact.name
    threads, cores = flagtable.read(c, THREADS).value, c.hardware.cores
    if threads is not None and cores is not None:
        on_node = cores / max(1, c.hardware.numa_nodes or 1)
        if threads * workers(c) > on_node:
            return c.out("K5.bound_crowded", fact, how=how, threads=threads)
    return c.out("K5.bound", fact, how=how)


@check("K10")
@hybrid_only("K10")
def mixed_gpus(c: Context) -> Outcome:
    hardware = c.hardware
    if not hardware.kinds:
        return c.out("K10.unknown")
    if c.tp * c.pp * c.dp == 1 and (hardware.count or 1) == 1:
        return c.out("K10.single")
    off = c.flag("disable_custom_all_reduce") is True
    edits = [Edit("disable_custom_all_reduce", "")] if c.command_line else []
    tp_fact = c.fact("tensor_parallel_size")
    if c.tp > 1 and hardware.mixed and not off:
        shown = ", ".join(sorted({g.name for g in hardware.kinds}))
        return c.out("K10.mixed_all_reduce", tp_fact, tp=c.tp, gpus=shown, edits=edits)
    if c.tp > 2 and not any(g.nvlink for g in hardware.kinds) and not off:
        return c.out("K10.pcie_all_reduce", tp_fact, tp=c.tp, edits=edits)
    if hardware.mixed_arch:
        archs = [f"{sm / 10:.1f}" for sm in sorted({g.sm for g in hardware.kinds})]
        listed = c.env_text("FLASHINFER_CUDA_ARCH_LIST") or ""
        fact = c.env("FLASHINFER_CUDA_ARCH_LIST")
        if not all(a in listed for a in archs) and (fact is None or fact.known):
            edit = Edit("FLASHINFER_CUDA_ARCH_LIST", " ".join(archs), env=True)
            return c.out("K10.arch_list", fact or c.unit.site, archs=" ".join(archs), edits=[edit])
    if hardware.mixed and c.env_text("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        edit = Edit("CUDA_DEVICE_ORDER", "PCI_BUS_ID", env=True)
        return c.out("K10.order", c.env("CUDA_DEVICE_ORDER") or c.unit.site, edits=[edit])
    return c.out("K10.ok", tp_fact)


@check("K11")
@hybrid_only("K11")
def host_memory(c: Context) -> Outcome:
    host = _host_experts(c)
    if host is None:
        return c.out("K11.unknown")
    need = host * _SPARE
    limit = c.unit.resources.memory_gib
    shown: dict[str, object] = {"need": f"{need:.0f}"}
    if limit is not None and number(limit.value) is not None and need > (number(limit.value) or 0):
        return c.out("K11.limit", limit, limit=f"{number(limit.value):g}", found=shown)
    promised = flagtable.read(c, HOST)
    ram = promised.value if promised.value is not None else c.hardware.ram_gib
    if ram is None:
        return c.out("K11.unknown")
    model = c.fact("model")
    if need > ram:
        return c.out("K11.too_small", model, promised.fact, ram=f"{ram:g}", found=shown)
    if need > 0.85 * ram:
        return c.out("K11.tight", model, promised.fact, ram=f"{ram:g}", found=shown)
    memlock = c.unit.resources.memlock
    if memlock is not None and _too_small(memlock, host):
        return c.out("K11.memlock", memlock)
    return c.out("K11.ok", model, ram=f"{ram:g}", found=shown)


def _host_experts(c: Context) -> float | None:
    """GiB of experts that stay in host memory: resident layers are taken off."""
    model = c.model
    if model is None or model.expert_gib is None:
        return None
    spec = flagtable.read(c, RESIDENT).value
    layers = (model.layers or 0) - (model.dense_layers or 0)
    if spec is None or layers <= 0:
        return model.expert_gib
    if spec.all_main:
        return 0.0
    resident = len([n for n in spec.main | spec.bare if (model.dense_layers or 0) <= n < (model.layers or 0)])
    return model.expert_gib * (1 - resident / layers)


def _too_small(fact: Fact, need_gib: float) -> bool:
    text = str(fact.value).strip().lower().split(":")[0]
    if text in ("infinity", "unlimited", "-1"):
        return False
    size = gib(text)
    return size is not None and size < need_gib
