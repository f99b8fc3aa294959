"""The audited units as one JSON tree."""

from __future__ import annotations

from typing import Any

from lvllm.audit import names
from lvllm.audit.checks.context import Outcome
from lvllm.audit.checks.rules import MAXIMA, SCORED, items
from lvllm.audit.facts import Site
from lvllm.audit.model import Model
from lvllm.audit.pipeline import Audited, Result
from lvllm.audit.report import changes, text

SCHEMA = 1
_PRIORITIES = ("P0", "P1", "P2")


def tool_version() -> str:
    """The version of the installed package, without importing it."""
    from importlib import metadata

    try:
        return metadata.version("lvllm")
    except metadata.PackageNotFoundError:
        return "unknown"


def tree(result: Result) -> dict[str, Any]:
    """Everything the report says, secrets masked."""
    units = [_unit(a, result) for a in result.units]
    notes = [_outcome(o, result, unit=a.unit.id) for a in result.units for o in _unique(a.notes)] + [
        _outcome(o, result, unit="") for o in result.advisories
    ]
    notes = _without_repeats(notes)
    notes.sort(key=_order)
    raw = {
        "schema": SCHEMA,
        "tool": {"name": "lvllm audit", "version": tool_version(), "reference_vllm": names.reference()},
        "project": {
            "files_scanned": result.scan.visited,
            "files_read": result.parsed,
            "files_failed": result.failed,
            "left_out": dict(sorted(result.scan.left_out.items())),
            "warnings": list(result.project.warnings),
        },
        "units": units,
        "advisories": notes,
        "summary": _summary(result, units, notes),
    }
    masked = result.vault.mask_tree(raw)
    assert isinstance(masked, dict)
    return masked


def _unique(outcomes: list[Outcome]) -> list[Outcome]:
    seen: set[tuple[str, tuple[Site, ...], str]] = set()
    kept = []
    for outcome in outcomes:
        key = (outcome.rule.id, tuple(outcome.evidence), str(sorted(outcome.values.items(), key=str)))
        if key not in seen:
            seen.add(key)
            kept.append(outcome)
    return kept


def _without_repeats(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One advisory per statement and place, whichever units share it."""
    seen: dict[str, dict[str, Any]] = {}
    for note in notes:
        evidence = [(e["file"], e["line"]) for e in note["evidence"]]
        seen.setdefault(f"{note['id']} {note['reason']} {evidence}", note)
    return list(seen.values())


def _order(entry: dict[str, Any]) -> tuple[Any, ...]:
    place = entry["evidence"][0] if entry["evidence"] else {"file": "", "line": 0}
    item = entry["id"]
    return entry["priority"] or "P9", item[0], int(item[1:]), place["file"], place["line"], entry["unit"]


def _outcome(outcome: Outcome, result: Result, unit: str) -> dict[str, Any]:
    lang = result.request.lang
    return {
        "id": outcome.rule.item,
        "title": items()[outcome.rule.item].title(lang),
        "priority": outcome.priority,
        "reason": text.reason(outcome, lang),
        "evidence": [_evidence(s, result) for s in outcome.evidence],
        "current": outcome.current,
        "suggested": text.change(outcome, lang) or None,
        "effect": text.effect(outcome, lang) or None,
        "risk": text.risk(outcome, lang) if outcome.priority else None,
        "rule": outcome.rule.id,
        "unit": unit,
    }


def _evidence(site: Site, result: Result) -> dict[str, Any]:
    return {"file": site.file, "line": site.line, "text": result.line(site)}


def _unit(audited: Audited, result: Result) -> dict[str, Any]:
    context, unit = audited.context, audited.unit
    found = []
    for item, outcome in audited.items.items():
        entry = _outcome(outcome, result, unit.id)
        del entry["unit"]
        entry["id"] = item
        entry["status"] = outcome.status
        applicable = outcome.status != "not_applicable"
        entry["points"] = (1 if outcome.status == "enabled" else 0) if applicable else None
        found.append(entry)
    hardware = context.hardware
    return {
        "id": unit.id,
        "name": unit.name,
        "launcher": unit.launcher,
        "mode": context.mode,
        "hybrid": context.hybrid,
        "model": _model(context.model, unit.settings.get("model") is not None),
        "hardware": {
            "gpu": sorted({g.name for g in hardware.kinds}) or None,
            "gpu_gib": sorted({g.gib for g in hardware.kinds}) or None,
            "architecture": sorted({g.arch for g in hardware.kinds}) or None,
            "count": hardware.count,
            "count_source": hardware.count_source,
            "source": hardware.source,
            "low_confidence": hardware.low_confidence,
            "unknown_gpu": hardware.unnamed or None,
            "cores": hardware.cores,
            "numa_nodes": hardware.numa_nodes,
            "ram_gib": hardware.ram_gib,
        },
        "parallel": {
            "tensor": context.tp, "pipeline": context.pp, "data": context.dp, "known": context.sizes_known(),
        },
        "versions": {"vllm": context.version.text or None, "source": context.version.source},
        "files": unit.files(),
        "scores": _scores(audited),
        "items": found,
        "changes": [
            {"file": c.file, "line": c.line, "before": c.before, "after": c.after}
            for c in changes.of_unit(audited, result)
        ],
    }  # fmt: skip


def _model(model: Model | None, named: bool) -> dict[str, Any]:
    if model is None:
        return {"name": None, "source": "dynamic" if named else "unknown"}
    weights = model.weights_gib
    return {
        "name": model.name,
        "source": model.source,
        "family": model.family or None,
        "params_b": model.params_b,
        "moe": model.moe,
        "mla": model.mla if model.known else None,
        "mtp": model.mtp if model.known else None,
        "quantized": model.quantized,
        "weights_gib": None if weights is None else round(weights, 1),
        "context": model.context,
        "layers": model.layers,
        "experts": model.experts,
    }


def _scores(audited: Audited) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for category, maximum in MAXIMA.items():
        if category == "K" and not audited.context.hybrid_shown:
            continue
        points, applicable, recommended = audited.score(category)
        scores[category] = {
            "points": points, "applicable": applicable, "max": maximum, "recommended": recommended,
        }  # fmt: skip
    points = sum(scores[c]["points"] for c in SCORED)
    applicable = sum(scores[c]["applicable"] for c in SCORED)
    base = applicable - audited.not_enabled(SCORED)
    scores["total"] = {
        "points": points, "applicable": applicable, "max": sum(MAXIMA[c] for c in SCORED),
        "percent": round(100 * points / base) if base else None,
    }  # fmt: skip
    return scores


def _summary(result: Result, units: list[dict[str, Any]], notes: list[dict[str, Any]]) -> dict[str, Any]:
    count = dict.fromkeys(_PRIORITIES, 0)
    for entry in [i for u in units for i in u["items"]] + notes:
        if entry["priority"] in count:
            count[entry["priority"]] += 1
    worst = min(units, key=lambda u: (u["scores"]["total"]["percent"] or 0, u["id"]), default=None)
    return {
        "p0": count["P0"], "p1": count["P1"], "p2": count["P2"],
        "worst_unit": worst["id"] if worst is not None else None,
    }  # fmt: skip
