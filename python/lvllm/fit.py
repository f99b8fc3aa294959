"""Does the host have room for the experts? Answered before any weight is read."""

from __future__ import annotations

from lvllm import envs, host, native
from lvllm.host import gb

_SLACK_BYTES = 512 << 20
"""Room for the tensors in flight while loading, and for scratch."""


_MEASURED = "measured"


class HostMemoryError(MemoryError):
    """The experts do not fit in host memory; the text holds what is needed, what there is, and a way out."""


def available_memory(settings: envs.Settings) -> tuple[int, str]:
    """(bytes, source) that experts may take: LVLLM_HOST_GIB, or what the machine and its cgroup leave.

    A cgroup limit above MemTotal means that the machine reports too little, since memory is plugged in as it
    is touched; then the limit is the truth.
    """
    if settings.host_gib is not None:
        return int(settings.host_gib * (1 << 30)), "LVLLM_HOST_GIB"
    limits = native.load().memory_limits()
    if limits["cgroup_limit"] is not None and limits["cgroup_limit"] > limits["total"]:
        return int(limits["cgroup_limit"]), "cgroup limit"
    return int(limits["usable"]), _MEASURED


def check(needed: int, settings: envs.Settings, *, what: str) -> str:
    """Compare `needed` bytes of experts (all ranks on this host) with memory; returns one line for the log.

    With LVLLM_ENABLE_NUMA_INTERLEAVE on, each node in use must also hold its equal share.
    Raises HostMemoryError with the numbers.
    """
    available, source = available_memory(settings)
    line = f"{what}: {gb(needed)} of experts, {gb(available)} of host memory available ({source})"
    if needed + _SLACK_BYTES > available:
        raise HostMemoryError(
            f"lvllm: {line}: {gb(needed + _SLACK_BYTES - available)} too little. Free memory, keep layers on "
            "stock vLLM's path with LVLLM_GPU_RESIDENT_MOE_LAYERS, or take a checkpoint with a smaller "
            "weight format. If the reported memory is not the truth, set LVLLM_HOST_GIB."
        )
    if source == _MEASURED and settings.enable_numa_interleave:
        _check_nodes(needed, settings, line)
    return line


def _check_nodes(needed: int, settings: envs.Settings, line: str) -> None:
    memory = {node: usable for node, (_, usable) in native.load().memory_limits()["nodes"].items()}
    nodes = [n for n in host.usable_nodes(settings.numa_nodes) if n in memory]
    if len(nodes) < 2:
        return
    share = -(-needed // len(nodes))
    short = [n for n in nodes if memory[n] < share]
    if short:
        shown = ", ".join(f"node {n}: {gb(memory[n])} free" for n in nodes)
        raise HostMemoryError(
            f"lvllm: {line}, but node {short[0]} cannot hold its share of {gb(share)} ({shown}). Free memory "
            "on that node, leave it out with LVLLM_NUMA_NODES, or set LVLLM_ENABLE_NUMA_INTERLEAVE=0 to "
            "skip this check."
        )
