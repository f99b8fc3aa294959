"""`lvllm doctor`: machine, installation and configuration as the engine sees them, with ways out."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

from lvllm import envs, fit, host, native
from lvllm.ranges import format_numbers

_NVIDIA = Path("/proc/driver/nvidia/version")
_FORMATS = ("bf16", "f16", "f32")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _bracketed(text: str) -> str:
    """The chosen word of a sysfs list such as `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0] or text


def _huge_pages() -> dict[str, str]:
    reserved = {}
    for folder in sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*")):
        size = folder.name.removeprefix("hugepages-")
        reserved[size] = f"{_first_line(folder / 'nr_hugepages')} reserved"
    return {"transparent": _bracketed(_first_line(_THP)), **reserved}


def _vllm(warnings: list[str]) -> dict[str, Any]:
    from lvllm.vllm import compat

    version = compat.vllm_version()
    facts: dict[str, Any] = {"version": version, "supported": compat.TESTED_TEXT}
    if sentence := compat.replacement():
        warnings.append(sentence)
    elif version is None:
        warnings.append(
            f"vLLM is not installed: install vLLM {compat.TESTED_TEXT} (the library works without it)"
        )
    elif not compat.in_tested_range(version):
        warnings.append(f"vLLM {version} is outside {compat.TESTED_TEXT}: install a version in that range")
    return facts


def _kernels(engine: Any, fmt: str) -> dict[str, str]:
    """Kernel of w13 of a small layer, for one row and for many; "none" where a pinned family has none."""
    sizes = {"num_experts": 2, "hidden_size": 256, "intermediate_size": 128, "top_k": 1}
    try:
        layer = engine.create_layer(f"doctor.{fmt}", format=fmt, dtype=fmt, **sizes)
    except ValueError as error:
        return {"1": "none", "many": f"none ({error})"}
    layer.fill_dummy(0)
    layer.seal()
    names = layer.kernels()["w13"]
    return {"1": names["1"], "many": names["many"]}


def _engine(warnings: list[str], settings: envs.Settings, measure: bool) -> dict[str, Any]:
    try:
        module = native.load()
    except native.NativeModuleError as error:
        warnings.append(str(error))
        return {}
    available, source = fit.available_memory(settings)
    limits = module.memory_limits()
    facts: dict[str, Any] = {
        "native": str(module.__version__),
        "cpu_features": list(module.cpu_features()),
        "memory": {
            "available_bytes": available,
            "source": source,
            "nodes": {str(n): {"total_bytes": t, "free_bytes": f} for n, (t, f) in limits["nodes"].items()},
        },
    }
    try:
        engine = module.Engine(**envs.engine_options(settings), allowed_cpus=host.inherited_cpus())
    except (module.LkError, ValueError) as error:
        warnings.append(f"the engine does not start: {error}")
        return facts
    try:
        facts["engine"] = engine.describe()
        facts["kernels"] = {fmt: _kernels(engine, fmt) for fmt in _FORMATS}
    finally:
        engine.close()
    warnings += [str(note) for note in facts["engine"].get("notes", [])]
    if measure:
        facts["read_gb_per_s"] = round(module.read_bandwidth(facts["engine"]["threads"]), 1)
    return facts


def collect(*, measure: bool = True) -> dict[str, Any]:
    """All facts as one JSON-able object; "warnings" holds sentences, each with one way out."""
    warnings: list[str] = []
    try:
        settings = envs.load()
        configuration = [{"setting": n, "value": v, "from": o} for n, v, o in settings.table()]
        warnings += settings.notices
    except envs.SettingError as error:
        warnings.append(str(error))
        settings = envs.load(environ={})
        configuration = []
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts: dict[str, Any] = {
        "lvllm": None,
        "allowed_cpus": format_numbers(host.inherited_cpus()),
        "huge_pages": _huge_pages(),
        "memlock": "unlimited" if memlock == resource.RLIM_INFINITY else memlock,
        "vllm": _vllm(warnings),
    }
    facts |= _engine(warnings, settings, measure)
    try:
        facts["lvllm"] = native.version()
    except native.NativeModuleError:
        facts["lvllm"] = "unknown"
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "lvllm" not in plugins.split(","):
        warnings.append(
            f"VLLM_PLUGINS={plugins!r} keeps this plugin out of vLLM: add lvllm to it, or unset it"
        )
    if facts["memlock"] != "unlimited" and _NVIDIA.exists():
        warnings.append(
            f"the limit of locked memory is {host.gb(memlock)}: staging buffers for a GPU need more; raise "
            "it with `ulimit -l unlimited`, or --ulimit memlock=-1 for a container"
        )
    if facts["huge_pages"]["transparent"] == "never":
        warnings.append(
            f"transparent huge pages are off: `echo madvise > {_THP}` saves TLB misses on expert weights"
        )
    facts["configuration"] = configuration
    facts["warnings"] = warnings
    return facts


def _print(facts: dict[str, Any]) -> None:
    memory, engine = facts.get("memory", {}), facts.get("engine", {})
    rows = [
        ("lvllm", facts["lvllm"]),
        ("vLLM", f"{facts['vllm']['version'] or 'not installed'} (supported: {facts['vllm']['supported']})"),
        ("CPU features", " ".join(facts.get("cpu_features", [])) or "unknown"),
        ("instruction set", engine.get("isa", "unknown")),
        ("allowed CPUs", facts["allowed_cpus"]),
        ("workers", f"{engine['threads']}" if engine else "unknown"),
    ]
    workers = {str(n["node"]): n for n in engine.get("nodes", [])}
    for node, size in memory.get("nodes", {}).items():
        mine = workers.get(node)
        who = f"{mine['workers']} workers on CPUs {host.worker_cpus(mine)}" if mine else "no workers"
        rows.append(
            (f"node {node}", f"{host.gb(size['free_bytes'])} free of {host.gb(size['total_bytes'])}, {who}")
        )
    if memory:
        rows.append(("memory", f"{host.gb(memory['available_bytes'])} available ({memory['source']})"))
    if "read_gb_per_s" in facts:
        rows.append(("read rate", f"{facts['read_gb_per_s']} GB/s, measured now with all workers"))
    for fmt, names in facts.get("kernels", {}).items():
        rows.append((f"kernels {fmt}", f"1 row: {names['1']}, many rows: {names['many']}"))
    rows.append(("huge pages", ", ".join(f"{k}: {v}" for k, v in facts["huge_pages"].items())))
    locked = facts["memlock"]
    rows.append(("locked memory", locked if locked == "unlimited" else host.gb(locked)))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    if facts["configuration"]:
        print("\nconfiguration")
        print(envs.format_table([(r["setting"], r["value"], r["from"]) for r in facts["configuration"]]))
    if facts["warnings"]:
        print("\nwarnings")
        print("\n".join(f"  - {line}" for line in facts["warnings"]))


def main(*, as_json: bool, measure: bool) -> int:
    """Print the report; 1 when there are warnings, else 0."""
    facts = collect(measure=measure)
    if as_json:
        print(json.dumps(facts, indent=1, default=str))
    else:
        _print(facts)
    return 1 if facts["warnings"] else 0
