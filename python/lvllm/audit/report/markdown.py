"""The report as Markdown; headings fixed, everything masked by the tree it is made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lvllm.audit import names
from lvllm.audit.checks.rules import MAXIMA, items
from lvllm.audit.pipeline import Result
from lvllm.audit.report import guide

_FENCES = {".sh": "bash", ".bash": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml",
           ".json": "json", ".ps1": "powershell", ".service": "ini"}  # fmt: skip


def render(tree: dict[str, Any], result: Result) -> str:
    """The whole report."""
    page = _Page(tree, result)
    page.basic()
    page.overview()
    page.suggestions()
    page.changes()
    page.details()
    page.reference()
    page.notes()
    return result.vault.mask("\n".join(page.lines).rstrip("\n") + "\n")


def cell(value: object) -> str:
    """Text that cannot break a table."""
    return str(value).replace("|", "\\|").replace("\n", " ")


class _Page:
    def __init__(self, tree: dict[str, Any], result: Result) -> None:
        self.tree, self.result = tree, result
        self.lang = result.request.lang
        self.lines: list[str] = [f"# {self.label('title')}", ""]

    def label(self, key: str, section: str = "labels", **values: object) -> str:
        return guide.label(key, self.lang, section, **values)

    def add(self, *lines: str) -> None:
        self.lines += lines

    def heading(self, key: str) -> None:
        self.add(f"## {self.label(key)}", "")

    def table(self, head: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
        titles = list(head)
        self.add(f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}")
        for row in rows:
            self.add(f"| {' | '.join(cell(v) for v in row)} |")
        self.add("")

    def unit_heading(self, unit: dict[str, Any]) -> None:
        if len(self.tree["units"]) > 1:
            self.add(f"### {self.label('unit')} {_unit_name(unit)}", "")

    # -- sections ----------------------------------------------------------------------------------

    def basic(self) -> None:
        self.heading("basic")
        for unit in self.tree["units"]:
            self.unit_heading(unit)
            hybrid = " + hybrid" if unit["hybrid"] else ""
            rows = [
                (self.label("unit"), _unit_name(unit)),
                (self.label("mode"), f"{unit['mode']}{hybrid} ({unit['launcher']})"),
                (self.label("model"), self._model(unit)),
                (self.label("gpu"), self._gpu(unit)),
                (self.label("host"), self._host(unit)),
                (self.label("version"), self._version(unit)),
                (self.label("sizes"), self._sizes(unit)),
                (self.label("files"), ", ".join(unit["files"])),
            ]
            self.add(*(f"- **{k}**: {v}" for k, v in rows), "")

    def _model(self, unit: dict[str, Any]) -> str:
        model = unit["model"]
        if model["name"] is None:
            return self.label("unknown_model")
        parts = [model["name"]]
        if model.get("params_b"):
            parts.append(f"{model['params_b']:g}B")
        if model.get("moe"):
            parts.append("MoE")
        if model.get("quantized"):
            parts.append(model["quantized"])
        if model.get("weights_gib"):
            parts.append(f"{model['weights_gib']:g} GiB")
        return ", ".join(parts)

    def _gpu(self, unit: dict[str, Any]) -> str:
        hardware = unit["hardware"]
        count = f"{hardware['count']} ({hardware['count_source']})" if hardware["count"] else "?"
        if not hardware["gpu"]:
            return f"{self.label('unknown_gpu')}; x {count}"
        sizes = "/".join(f"{g:g}" for g in hardware["gpu_gib"])
        archs = ", ".join(hardware["architecture"])
        return f"{', '.join(hardware['gpu'])} x {count}, {sizes} GiB, {archs} ({hardware['source']})"

    def _host(self, unit: dict[str, Any]) -> str:
        hardware = unit["hardware"]
        parts = []
        for key, suffix in (("cores", "cores"), ("numa_nodes", "NUMA nodes"), ("ram_gib", "GiB")):
            if hardware[key] is not None:
                parts.append(f"{hardware[key]:g} {suffix}")
        return ", ".join(parts) or self.label("unknown_host")

    def _version(self, unit: dict[str, Any]) -> str:
        versions = unit["versions"]
        if versions["vllm"] is None:
            return self.label("unknown_version", reference=names.reference())
        return f"{versions['vllm']} ({versions['source']})"

    def _sizes(self, unit: dict[str, Any]) -> str:
        sizes = unit["parallel"]
        dynamic = "" if sizes["known"] else " (?)"
        return f"TP {sizes['tensor']} x PP {sizes['pipeline']} x DP {sizes['data']}{dynamic}"

    def overview(self) -> None:
        self.heading("overview")
        for unit in self.tree["units"]:
            self.unit_heading(unit)
            rows: list[list[object]] = []
            for category in MAXIMA:
                if category == "K" or category not in unit["scores"]:
                    continue
                rows.append(self._score_row(category, unit["scores"][category]))
            total = unit["scores"]["total"]
            percent = "" if total["percent"] is None else f", {total['percent']}%"
            applicable = f"({total['applicable']} {self.label('applicable')}{percent})"
            recommended = sum(
                unit["scores"][c]["recommended"] for c in MAXIMA if c != "K" and c in unit["scores"]
            )
            rows.append([f"**{self.label('total')}**", f"**{total['points']}/{total['max']}** {applicable}",
                         f"**{total['points']}**", f"**{recommended}**"])  # fmt: skip
            if "K" in unit["scores"]:
                rows.append(self._score_row("K", unit["scores"]["K"], of_maximum=True))
            head = [self.label(k) for k in ("category", "score", "enabled", "recommended")]
            self.table(head, rows)
        summary = self.tree["summary"]
        scores = "; ".join(
            f"{_unit_name(u)} {u['scores']['total']['points']}/{u['scores']['total']['max']}"
            for u in self.tree["units"]
        )
        worst = f"; {self.label('worst')}: {summary['worst_unit']}" if len(self.tree["units"]) > 1 else ""
        counts = f"P0 {summary['p0']}, P1 {summary['p1']}, P2 {summary['p2']}"
        self.add(f"{self.label('project')}: {scores}; {counts}{worst}", "")

    def _score_row(self, category: str, score: dict[str, Any], *, of_maximum: bool = False) -> list[object]:
        shown = f"{score['points']}/{score['applicable']}"
        shown += f" (/{score['max']})" if not of_maximum else f" ({score['points']}/{score['max']})"
        return [self.label(category, "category"), shown, score["points"], score["recommended"]]

    def suggestions(self) -> None:
        self.heading("suggestions")
        entries = [{**i, "unit": u["id"]} for u in self.tree["units"] for i in u["items"] if i["priority"]]
        entries += self.tree["advisories"]
        several = len(self.tree["units"]) > 1
        for priority in ("P0", "P1", "P2"):
            self.add(f"### {self.label(priority)}", "")
            level = sorted((e for e in entries if e["priority"] == priority), key=_order)
            for entry in level:
                self._suggestion(entry, several)
            if not level:
                self.add(self.label("none"))
            self.add("")

    def _suggestion(self, entry: dict[str, Any], several: bool) -> None:
        where = f" `{entry['unit']}`" if several and entry.get("unit") else ""
        self.add(f"- **{entry['id']}** {entry['title']}{where}: {entry['reason']}")
        for evidence in entry["evidence"]:
            quoted = evidence["text"].replace("`", "'")
            text = f": `{quoted}`" if quoted else ""
            self.add(f"  - {self.label('evidence')}: {evidence['file']}:{evidence['line']}{text}")
        for key, field in (("change", "suggested"), ("effect", "effect"), ("risk", "risk")):
            if entry.get(field):
                self.add(f"  - {self.label(key)}: {entry[field]}")

    def changes(self) -> None:
        self.heading("changes")
        changes = [c for u in self.tree["units"] for c in u["changes"]]
        for change in _distinct(changes):
            fence = _fence(change["file"])
            self.add(f"`{change['file']}:{change['line']}`", "", f"```{fence}")
            self.add(
                f"# {self.label('old')}" if fence != "json" else f"// {self.label('old')}", change["before"]
            )
            after = change["after"] or self.label("removed")
            marker = "//" if fence == "json" else "#"
            self.add(
                f"{marker} {self.label('new')}", after if change["after"] else f"{marker} {after}", "```", ""
            )
        if not changes:
            self.add(self.label("none"), "")

    def details(self) -> None:
        self.heading("details")
        for unit in self.tree["units"]:
            self.unit_heading(unit)
            for category in MAXIMA:
                rows = [
                    (i["id"], i["title"], self.label(i["status"], "status"), i["reason"])
                    for i in unit["items"]
                    if i["id"][0] == category
                ]
                if rows:
                    self.add(f"**{self.label(category, 'category')}**", "")
                    self.table(["Id", *(self.label(k) for k in ("item", "status", "reason"))], rows)

    def reference(self) -> None:
        self.heading("tree")
        self.add("```text", *guide.tree_lines(self.result), "```", "")
        self.heading("reference")
        shown = set()
        for audited in self.result.units:
            row = guide.template(audited.context)
            name = row["name"][0 if self.lang == "en" else 1]
            if name in shown:
                continue
            shown.add(name)
            note = row["note"][0 if self.lang == "en" else 1]
            number = "7h" if row.get("hybrid") else row["number"]
            self.add(f"{number}. **{name}**: `{row['settings']}`", "", f"   {note}", "")
        self.heading("capacity")
        self._capacity()

    def _capacity(self) -> None:
        head = [h.strip() for h in self.label("cap_head").split("|")]
        own = [r for r in (guide.unit_row(a) for a in self.result.units) if r is not None]
        if own:
            self.add(f"{self.label('computed')}:", "")
            self.add(f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *dict.fromkeys(own), "")
        fraction = names.table("options")["defaults"]["gpu_memory_utilization"]
        self.add(self.label("cap_note", fraction=fraction), "")
        self.add(f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *guide.capacity_rows(self.lang), "")
        if any(a.context.rlhf for a in self.result.units):
            columns = [h.strip() for h in self.label("rlmem").split("|")]
            self.add(f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}")
            for row in names.table("guide")["rl_memory"]:
                self.add(f"| {row['text'][0 if self.lang == 'en' else 1]} |")
            self.add("")

    def notes(self) -> None:
        self.heading("notes")
        project = self.tree["project"]
        self.add("- " + self.label("scanned", files=project["files_scanned"], read=project["files_read"],
                                   failed=project["files_failed"]))  # fmt: skip
        for reason, count in project["left_out"].items():
            self.add("- " + self.label("left_out", count=count, reason=reason))
        for unit in self.tree["units"]:
            if unit["versions"]["vllm"] is None:
                self.add("- " + self.label("assumed", unit=unit["id"], reference=names.reference()))
            hardware = unit["hardware"]
            if hardware["low_confidence"]:
                self.add("- " + self.label("low", unit=unit["id"], source=hardware["source"]))
            if hardware["unknown_gpu"]:
                self.add("- " + self.label("bad_gpu", gpu=hardware["unknown_gpu"]))
        for advisory in self.tree["advisories"]:
            place = (
                f" ({advisory['evidence'][0]['file']}:{advisory['evidence'][0]['line']})"
                if advisory["evidence"]
                else ""
            )
            self.add(
                f"- {advisory['id']} {items()[advisory['id']].title(self.lang)}: {advisory['reason']}{place}"
            )
        for warning in project["warnings"]:
            self.add(f"- {warning}")
        self.add("- " + self.label("assumption"))


def _unit_name(unit: dict[str, Any]) -> str:
    return f"{unit['name']} ({unit['id']})" if unit["name"] else unit["id"]


def _order(entry: dict[str, Any]) -> tuple[Any, ...]:
    place = entry["evidence"][0] if entry["evidence"] else {"file": "", "line": 0}
    return entry["id"][0], int(entry["id"][1:]), place["file"], place["line"], entry.get("unit") or ""


def _fence(file: str) -> str:
    base = file.rsplit("/", 1)[-1]
    if base.lower().startswith("dockerfile"):
        return "dockerfile"
    return _FENCES.get(base[base.rfind(".") :] if "." in base else "", "text")


def _distinct(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for change in changes:
        seen.setdefault((change["file"], change["line"], change["before"], change["after"]), change)
    return list(seen.values())
