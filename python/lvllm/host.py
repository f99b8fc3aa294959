"""Facts about the host that Python needs before the engine runs: allowed CPUs, memory, cgroup limits."""

from __future__ import annotations

import os
from pathlib import Path

from lvllm.flags import INHERITED_CPUS
from lvllm.ranges import format_numbers, parse_numbers

_CGROUP_UNLIMITED = 1 << 60
CGROUP = "cgroup limit"
"""Source that available_memory() names when a memory cgroup decides."""


def publish_inherited_cpus() -> None:
    """Record this process's CPU mask for its children.

    vLLM's workers bind their own threads, so a worker's mask says where vLLM put it, not what the server may
    use. The first process of the tree in which the plugin registers still has the mask that the user gave.
    """
    if INHERITED_CPUS not in os.environ:
        os.environ[INHERITED_CPUS] = format_numbers(os.sched_getaffinity(0))


def inherited_cpus() -> tuple[int, ...]:
    """CPUs that the server was allowed at its start; this process's own mask when nothing was recorded."""
    recorded = os.environ.get(INHERITED_CPUS)
    return parse_numbers(recorded) if recorded else tuple(sorted(os.sched_getaffinity(0)))


def quiet_openmp() -> None:
    """Keep OpenMP threads of child processes from spinning on the engine's cores after each parallel region.

    libgomp and libiomp read these when they are loaded; a value that the user set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _meminfo() -> dict[str, int]:
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return fields


def _cgroup_folders() -> list[Path]:
    """This process's cgroup and its ancestors: v2, and v1's memory controller."""
    folders: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        inside = root / path.lstrip("/")
        folders += [inside, *(p for p in inside.parents if p == root or root in p.parents)]
    return folders


def cgroup_memory_left() -> int | None:
    """Bytes that the tightest memory cgroup still grants; None without a limit. Page cache counts as free."""
    left: int | None = None
    for folder in _cgroup_folders():
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read_int(folder / limit_file), _read_int(folder / usage_file)
            if limit is None or usage is None or limit >= _CGROUP_UNLIMITED:
                continue
            cache = 0
            try:
                for line in (folder / "memory.stat").read_text().splitlines():
                    key, value = line.split()
                    if key in ("inactive_file", "active_file"):
                        cache += int(value)
            except (OSError, ValueError):
                pass
            here = max(0, limit - max(0, usage - cache))
            left = here if left is None else min(left, here)
    return left


def available_memory() -> tuple[int, str]:
    """(bytes, source) that a new process may use: the smaller of MemAvailable and what the cgroup grants.

    A cgroup limit above MemTotal means that the machine reports too little (memory that is plugged in on
    demand); then the cgroup is the truth.
    """
    memory = _meminfo()
    available = memory["MemAvailable"]
    left = cgroup_memory_left()
    if left is not None and (left < available or left > memory["MemTotal"]):
        return left, CGROUP
    return available, "MemAvailable"


def node_memory() -> dict[int, tuple[int, int]]:
    """NUMA node -> (total, free) bytes; a node 0 with the machine's figures on a kernel without NUMA."""
    nodes: dict[int, tuple[int, int]] = {}
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        figures = {}
        try:
            for line in (folder / "meminfo").read_text().splitlines():
                parts = line.split()
                figures[parts[2].rstrip(":")] = int(parts[3]) * 1024
        except (OSError, ValueError, IndexError):
            continue
        total = figures.get("MemTotal", 0)
        if total:
            free = figures.get("MemFree", 0) + figures.get("FilePages", 0) - figures.get("Shmem", 0)
            nodes[int(folder.name[4:])] = (total, min(total, free))
    if nodes:
        return nodes
    memory = _meminfo()
    return {0: (memory["MemTotal"], memory["MemAvailable"])}


def usable_nodes(wanted: tuple[int, ...] | None) -> list[int]:
    """NUMA nodes with a CPU that this server may run on, restricted to `wanted` if given."""
    allowed = set(inherited_cpus())
    nodes = []
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        try:
            text = (folder / "cpulist").read_text().strip()
        except OSError:
            continue
        if text and allowed.intersection(parse_numbers(text)):
            nodes.append(int(folder.name[4:]))
    nodes = nodes or [0]
    return sorted(n for n in nodes if wanted is None or n in wanted)


def gb(count: float) -> str:
    """Bytes as decimal GB, for messages."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
