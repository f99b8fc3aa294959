"""What must be settled before the engine runs: allowed CPUs, OpenMP's spinning, the nodes in use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lvllm.flags import INHERITED_CPUS
from lvllm.ranges import format_numbers, parse_numbers


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


def worker_cpus(node: Mapping[str, Any]) -> str:
    """CPUs of all workers of one entry of Engine.describe()["nodes"], as a list such as `0-7,16`."""
    return format_numbers({cpu for cpus in node["cpus"] for cpu in cpus})


def gb(count: float) -> str:
    """Bytes as decimal GB, for messages."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
