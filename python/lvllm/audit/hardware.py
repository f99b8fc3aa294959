"""GPUs, cores, NUMA nodes and memory: given, declared by the project, or unknown."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lvllm.audit import names
from lvllm.audit.facts import Fact, Unit
from lvllm.audit.values import index_ranges, number

_SEPARATORS = re.compile(r"[\s_\-]+")
_GIB = re.compile(r"(\d{2,3})\s*(?:gib|gb|g)?$", re.I)
_FILE_HINT = re.compile(r"(?<![a-z0-9])(?:(\d+)\s*x\s*)?([a-z]*\d{2,4}[a-z]*)(?![a-z0-9])", re.I)
MAX_COMMENT_LINES = 60
_FILE_NAMES = frozenset(
    (
        "h100",
        "h200",
        "a100",
        "h20",
        "b200",
        "b300",
        "l40",
        "l40s",
        "a10",
        "a10g",
        "v100",
        "t4",
        "3090",
        "4090",
        "5090",
        "a6000",
        "gh200",
        "gb200",
        "l4",
    )
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    arch: str
    sm: int
    gib: float
    nvlink: bool = False

    @property
    def fp8(self) -> bool:
        return self.sm >= 89


@dataclass(slots=True)
class Hardware:
    """What a unit runs on. `gpus` lists one entry per GPU when given so, else one kind."""

    gpu: Gpu | None = None
    kinds: list[Gpu] = field(default_factory=list)
    count: int | None = None
    count_source: str = "unknown"
    source: str = "unknown"
    low_confidence: bool = False
    cores: float | None = None
    cores_source: str = "unknown"
    numa_nodes: int | None = None
    ram_gib: float | None = None
    ram_source: str = "unknown"
    smt: bool | None = None
    vm: bool = False
    unnamed: str = ""
    """A GPU that was given but is not in the table."""

    @property
    def gib(self) -> float | None:
        return min(g.gib for g in self.kinds) if self.kinds else None

    @property
    def mixed(self) -> bool:
        return len({g.name for g in self.kinds}) > 1

    @property
    def mixed_arch(self) -> bool:
        return len({g.sm for g in self.kinds}) > 1


@dataclass(frozen=True, slots=True)
class Given:
    """Hardware given on the command line."""

    gpus: tuple[str, ...] = ()
    gpu_mem: float | None = None
    cores: str | None = None
    numa_nodes: int | None = None
    ram: float | None = None


def find(name: str) -> Gpu | None:
    """The GPU that a name means: the longest name of the table that it contains."""
    text = _SEPARATORS.sub("", name).lower()
    best: tuple[int, dict[str, Any]] | None = None
    for entry in names.table("gpus")["gpu"]:
        for known in entry["names"]:
            short = _SEPARATORS.sub("", known).lower()
            if short in text and (best is None or len(short) > best[0]):
                best = (len(short), entry)
    if best is None:
        return None
    entry = best[1]
    sizes: list[float] = entry["gib"]
    match = _GIB.search(text)
    stated = float(match.group(1)) if match else None
    gib = next((s for s in sizes if s == stated), sizes[0])
    shown = max((k for k in entry["names"] if _SEPARATORS.sub("", k).lower() in text), key=len)
    return Gpu(shown, entry["arch"], entry["sm"], gib, entry.get("nvlink", False))


def parse_given(texts: Sequence[str]) -> tuple[list[Gpu], int | None, str]:
    """``NAME[:COUNT]`` entries (commas allowed): kinds repeated by count, total count, unknown name."""
    kinds: list[Gpu] = []
    total = 0
    counted = False
    unknown = ""
    for text in (part for t in texts for part in t.split(",") if part.strip()):
        name, _, count = text.strip().rpartition(":")
        if not name or not count.strip().isdigit():
            name, count = text.strip(), ""
        found = find(name)
        if found is None:
            unknown = name
            continue
        copies = int(count) if count else 1
        counted |= bool(count) or len(texts) > 1 or "," in text
        kinds += [found] * copies
        total += copies
    return kinds, total if counted else None, unknown


def detect(
    unit: Unit, given: Given, sizes: int | None, read: Callable[[str], str | None] = lambda _file: None
) -> Hardware:
    """The hardware of a unit. `sizes` = TP x PP x DP, the last resort for the number of GPUs.

    `read` gives the text of a project file, for its comments.
    """
    hardware = Hardware()
    if given.gpus:
        texts = list(given.gpus)
        if texts == ["local"]:
            texts = _local_gpus()
        hardware.kinds, hardware.count, hardware.unnamed = parse_given(texts)
        hardware.source = "given"
        if hardware.count is not None:
            hardware.count_source = "given"
    elif unit.resources.gpu_name is not None:
        found = find(str(unit.resources.gpu_name.value))
        hardware.kinds = [found] if found else []
        hardware.source = "node selector"
    else:
        _from_names(hardware, unit, read)
    if given.gpu_mem is not None and hardware.kinds:
        hardware.kinds = [Gpu(g.name, g.arch, g.sm, given.gpu_mem, g.nvlink) for g in hardware.kinds]
    hardware.gpu = min(hardware.kinds, key=lambda g: (g.sm, g.gib)) if hardware.kinds else None
    if hardware.count is None:
        _count(hardware, unit, sizes)
    _host(hardware, unit, given)
    return hardware


def _from_names(hardware: Hardware, unit: Unit, read: Callable[[str], str | None]) -> None:
    """GPU names in file and folder names, then in comments of the unit's own file: low confidence."""
    for file in unit.files():
        parts = re.split(r"[/._\-]+", file.lower())
        if _guess(hardware, parts, f"file name {file}"):
            return
    text = read(unit.site.file) or ""
    for number_, line in enumerate(text.splitlines()[:MAX_COMMENT_LINES], 1):
        comment = line.strip()
        where = f"comment {unit.site.file}:{number_}"
        if comment.startswith("#") and _guess(hardware, comment.lower().split(), where):
            return


def _guess(hardware: Hardware, parts: Sequence[str], source: str) -> bool:
    for part in parts:
        for match in _FILE_HINT.finditer(part):
            found = find(match.group(2)) if match.group(2) in _FILE_NAMES else None
            if found is None:
                continue
            hardware.kinds, hardware.source, hardware.low_confidence = [found], source, True
            return True
    return False


def _count(hardware: Hardware, unit: Unit, sizes: int | None) -> None:
    visible = unit.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.known and isinstance(visible.value, str):
        ids = [d for d in visible.value.split(",") if d.strip()]
        if ids and all(re.match(r"^\s*(\d+|GPU-[\w-]+|MIG-[\w-]+)\s*$", d) for d in ids):
            hardware.count, hardware.count_source = len(ids), "CUDA_VISIBLE_DEVICES"
            return
    if unit.resources.gpus is not None:
        hardware.count, hardware.count_source = int(unit.resources.gpus.value), unit.resources.gpus.origin
        return
    per_node = unit.keys.get("trainer.n_gpus_per_node")
    nodes = unit.keys.get("trainer.nnodes")
    if per_node is not None and number(per_node.value) is not None:
        total = (number(per_node.value) or 0) * ((number(nodes.value) if nodes is not None else 1) or 1)
        hardware.count, hardware.count_source = int(total), "trainer.n_gpus_per_node"
        return
    if sizes is not None:
        hardware.count, hardware.count_source = sizes, "parallel sizes"


def _host(hardware: Hardware, unit: Unit, given: Given) -> None:
    if given.cores == "local":
        hardware.cores, hardware.smt = _local_cores()
        hardware.vm = _local_vm()
        hardware.cores_source = "local machine"
        hardware.numa_nodes = _local_nodes()
        hardware.ram_gib, hardware.ram_source = _local_ram(), "local machine"
    elif given.cores is not None:
        hardware.cores, hardware.cores_source = number(given.cores), "given"
    elif unit.resources.cpus is not None:
        hardware.cores, hardware.cores_source = number(unit.resources.cpus.value), unit.resources.cpus.origin
    elif unit.resources.cpuset is not None:
        ranges = index_ranges(str(unit.resources.cpuset.value))
        if ranges:
            hardware.cores = float(sum(b - a + 1 for a, b in ranges if b >= a))
            hardware.cores_source = "cpuset"
    if given.numa_nodes is not None:
        hardware.numa_nodes = given.numa_nodes
    if given.ram is not None:
        hardware.ram_gib, hardware.ram_source = given.ram, "given"
    elif unit.resources.memory_gib is not None and hardware.ram_gib is None:
        hardware.ram_gib = number(unit.resources.memory_gib.value)
        hardware.ram_source = unit.resources.memory_gib.origin


def _local_gpus() -> list[str]:
    """Names of the local GPUs from the driver's files; nothing is run."""
    base = "/proc/driver/nvidia/gpus"
    found = []
    try:
        for folder in sorted(os.listdir(base)):
            with open(f"{base}/{folder}/information", encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.startswith("Model:"):
                        found.append(f"{line.partition(':')[2].strip()}:1")
    except OSError:
        return []
    return found


def _local_cores() -> tuple[float, bool]:
    """Physical cores that this process may use, and whether hyper-threads exist."""
    cpus = sorted(os.sched_getaffinity(0))
    cores = set()
    for cpu in cpus:
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path, encoding="ascii") as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(cpu))
    return float(len(cores)), len(cores) < len(cpus)


def _local_vm() -> bool:
    """Whether the processor reports a hypervisor."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return any(line.startswith("flags") and " hypervisor" in line for line in file)
    except OSError:
        return False


def _local_nodes() -> int | None:
    try:
        found = [n for n in os.listdir("/sys/devices/system/node") if re.fullmatch(r"node\d+", n)]
    except OSError:
        return None
    return len(found) or None


def _local_ram() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        return None


def visible_devices(unit: Unit) -> Fact | None:
    """The unit's ``CUDA_VISIBLE_DEVICES``, if its value is known."""
    fact = unit.env.get("CUDA_VISIBLE_DEVICES")
    return fact if fact is not None and fact.known else None
