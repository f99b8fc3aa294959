"""Does the host have room for the experts? Answered before any weight is read."""

from __future__ import annotations

from lvllm import envs, host
from lvllm.host import gb

_SLACK_BYTES = 512 << 20
"""Room for the tensors in flight while loading, and for scratch."""


class HostMemoryError(MemoryError):
    """The experts do not fit in host memory; the text holds what is needed, what there is, and a way out."""


def check(needed: int, settings: envs.Settings, *, what: str) -> str:
    """Compare `needed` bytes of experts (all ranks on this host) with memory; returns one line for the log.

    With LVLLM_ENABLE_NUMA_INTERLEAVE on, each node in use must also hold its equal share.
    Raises HostMemoryError with the numbers.
    """
    if settings.host_gib is not None:
        available, source = int(settings.host_gib * (1 << 30)), "LVLLM_HOST_GIB"
    else:
        available, source = host.available_memory()
    line = f"{what}: {gb(needed)} of experts, {gb(available)} of host memory available ({source})"
    if needed + _SLACK_BYTES > available:
        raise HostMemoryError(
            f"lvllm: {line}: {gb(needed + _SLACK_BYTES - available)} too little. Free memory, keep layers on "
            "stock vLLM's path with LVLLM_GPU_RESIDENT_MOE_LAYERS, or take a checkpoint with a smaller "
            "weight format. If the reported memory is not the truth, set LVLLM_HOST_GIB."
        )
    if settings.host_gib is None and source != host.CGROUP and settings.enable_numa_interleave:
        _check_nodes(needed, settings, line)
    return line


def _check_nodes(needed: int, settings: envs.Settings, line: str) -> None:
    memory = host.node_memory()
    nodes = [n for n in host.usable_nodes(settings.numa_nodes) if n in memory]
    if len(nodes) < 2:
        return
    share = -(-needed // len(nodes))
    short = [n for n in nodes if memory[n][1] < share]
    if short:
        shown = ", ".join(f"node {n}: {gb(memory[n][1])} free" for n in nodes)
        raise HostMemoryError(
            f"lvllm: {line}, but node {short[0]} cannot hold its share of {gb(share)} ({shown}). Free memory "
            "on that node, leave it out with LVLLM_NUMA_NODES, or set LVLLM_ENABLE_NUMA_INTERLEAVE=0 to "
            "skip this check."
        )
