"""Decision tree, reference template and capacity tables."""

from __future__ import annotations

from typing import Any

from lvllm.audit import capacity, modes, names
from lvllm.audit.checks.context import Context
from lvllm.audit.pipeline import Audited, Result

REFERENCE_GIB = 80


def label(key: str, lang: str, section: str = "labels", **values: object) -> str:
    """A fixed text of the report."""
    texts = names.table("guide")[section][key]
    text = str(texts[0 if lang == "en" else 1])
    return text.format(**values) if values else text


def taken(result: Result) -> set[str]:
    """The branches of the decision tree that the findings lead to."""
    branches: set[str] = set()
    for audited in result.units:
        c = audited.context
        recommended = {o.rule.item for o in audited.outcomes() if o.priority is not None}
        start = {o.rule.item for o in audited.outcomes() if o.priority == "P0" and o.rule.effect == "start"}
        if start - {"C1"}:
            branches.add("start")
        if "C1" in start:
            branches.add("oom")
            if c.moe and not c.hybrid:
                branches.add("oom.moe")
            branches.add("oom.quantized" if c.quantized else "oom.quantize")
        if c.goal == "throughput":
            branches.add("throughput")
            if "C3" in recommended or "C5" in recommended:
                branches.add("throughput.dp")
            if "J2" in recommended or "I2" in recommended:
                branches.add("throughput.cpu")
            if c.hybrid:
                branches.add("throughput.hybrid")
            if "E2" in recommended or "E5" in recommended:
                branches.add("throughput.gpu")
        if c.goal == "latency":
            branches |= {"ttft", "tpot"}
        if "I1" in recommended:
            branches |= {"throughput", "throughput.lora"}
        if c.hybrid and recommended & {"K2", "K3", "K4", "K9"}:
            branches.add("tpot")
        if c.hybrid and "K6" in recommended:
            branches.add("ttft")
        if "E3" in recommended:
            branches.add("preempt")
        if c.rlhf:
            branches |= {"rl", "rl.colocate" if c.mode == modes.COLOCATE else "rl.server"}
    return branches


def tree_lines(result: Result) -> list[str]:
    """The tree as text, the taken branches marked."""
    lang = result.request.lang
    marked = taken(result)
    rows: list[dict[str, Any]] = names.table("guide")["tree"]
    lines = []
    for i, row in enumerate(rows):
        depth = int(row["depth"])
        last = not any(int(r["depth"]) == depth for r in _siblings(rows, i))
        branch = "└─" if last else "├─"
        parent_last = depth > 0 and not any(int(r["depth"]) == 0 for r in rows[i + 1 :])
        prefix = "" if depth == 0 else ("   " if parent_last else "│  ")
        mark = f"   ◀ {label('taken', lang)}" if row["id"] in marked else ""
        lines.append(f"{prefix}{branch} {row['text'][0 if lang == 'en' else 1]}{mark}")
    return lines


def _siblings(rows: list[dict[str, Any]], i: int) -> list[dict[str, Any]]:
    """Rows after `i` up to the end of its parent."""
    depth = int(rows[i]["depth"])
    found = []
    for row in rows[i + 1 :]:
        if int(row["depth"]) < depth:
            break
        found.append(row)
    return found


def template(c: Context) -> dict[str, Any]:
    """The nearest template: mode first, then hybrid, goal, size, architecture and number of GPUs."""
    rows: list[dict[str, Any]] = names.table("guide")["template"]
    fitting = [r for r in rows if c.mode in r["modes"] and bool(r.get("hybrid", False)) == c.hybrid]
    if not fitting:
        fitting = [r for r in rows if c.mode in r["modes"]]

    def distance(row: dict[str, Any]) -> tuple[float, int]:
        total = 0.0
        if row.get("goal") is not None:
            total += 0.0 if row["goal"] == c.goal else 100.0
        elif c.goal == "latency":
            total += 0.5
        size = c.model.params_b if c.model is not None else None
        if size is not None and row.get("params_b"):
            ratio = size / row["params_b"]
            total += abs(ratio - 1) if ratio >= 1 else abs(1 / ratio - 1)
        if c.hardware.gpu is not None and row.get("arch"):
            total += 0.0 if row["arch"] == c.hardware.gpu.arch else 2.0
        if c.hardware.count is not None and row.get("gpus"):
            total += abs(c.hardware.count - row["gpus"]) / 8
        return total, row["number"]

    return min(fitting, key=distance)


def _row(name: str, weights: float, per_token: float, pool: float, length: float) -> str:
    tokens = pool * 2**30 / per_token
    cells = [
        name, f"{weights:.1f}", f"{per_token / 1024:.0f} KiB", f"{pool:.1f}", f"{tokens / 1000:.0f}K",
        f"{int(tokens / length)} at {length / 1024:.0f}K", f"{tokens / 2048:.0f}", f"{tokens / 512:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def capacity_rows(lang: str) -> list[str]:
    """The reference table: one A100 80 GB."""
    fraction = names.table("options")["defaults"]["gpu_memory_utilization"]
    overhead = capacity.overhead_gib(REFERENCE_GIB)
    rows = []
    for entry in names.table("guide")["capacity"]:
        per_token = 2.0 * entry["layers"] * entry["kv_heads"] * 128 * 2
        pool = REFERENCE_GIB * fraction - entry["weights_gib"] - overhead
        if pool > 0:
            rows.append(_row(entry["name"], entry["weights_gib"], per_token, pool, entry["length"]))
            continue
        ways = [
            t for t in (2, 4, 8, 16) if REFERENCE_GIB * fraction - entry["weights_gib"] / t - overhead > 0
        ][:2]
        pools = "; ".join(
            f"TP {t}: {REFERENCE_GIB * fraction - entry['weights_gib'] / t - overhead:.1f}" for t in ways
        )
        need = label("needs", lang, gpus=ways[0])
        rows.append(f"| {entry['name']} | {entry['weights_gib']:.1f} | - | {need} ({pools}) | | | | |")
    return rows


def unit_row(audited: Audited) -> str | None:
    """The capacity of one GPU of a unit, if model and GPU are known."""
    c = audited.context
    estimate, model, length = c.estimate, c.model, c.max_len
    if estimate is None or model is None or estimate.bytes_per_token is None or length is None:
        return None
    gpu = c.hardware.gpu
    name = f"{model.name} ({gpu.name if gpu else '?'}, TP {c.tp})"
    if estimate.pool_gib <= 0:
        return f"| {name} | {estimate.weights_gib:.1f} | - | {estimate.pool_gib:.1f} | | | | |"
    return _row(name, estimate.weights_gib, estimate.bytes_per_token, estimate.pool_gib, length)
