"""Definite changes: the old and the new text of lines and commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from lvllm.audit import names
from lvllm.audit.checks.context import Edit
from lvllm.audit.facts import Fact, Launch, State, Word
from lvllm.audit.pipeline import Audited, Result

_ENV_LINE = re.compile(
    r"""^\s*(?:-\s*|export\s+|ENV\s+|Environment=)?["']?[A-Za-z_]\w*["']?\s*(?:=|:)\s*\S*\s*$"""
)


@dataclass(frozen=True, slots=True)
class Change:
    """One replacement; `after` '' = the line goes."""

    file: str
    line: int
    before: str
    after: str


def of_unit(audited: Audited, result: Result) -> list[Change]:
    """Every definite change of a unit, commands first."""
    edits: dict[tuple[str, bool], Edit] = {}
    for outcome in audited.outcomes():
        for edit in outcome.edits:
            edits.setdefault((edit.setting, edit.env), edit)
    unit = audited.unit
    command: list[Edit] = []
    lines: list[tuple[Fact, Edit]] = []
    for edit in edits.values():
        fact = unit.env.get(edit.setting) if edit.env else unit.settings.get(edit.setting)
        if edit.env:
            if fact is not None and fact.state is State.LITERAL:
                lines.append((fact, edit))
        elif (unit.launch is not None and edit.setting in unit.launch.spans) or (
            fact is None and unit.launch is not None and unit.strict_names and edit.value is not None
        ):
            command.append(edit)
        elif fact is not None and fact.state is State.LITERAL and fact.site.line > 0:
            lines.append((fact, edit))
    found: list[Change] = []
    if command and unit.launch is not None and unit.launch.words:
        after = corrected(unit.launch, command)
        before = layout([w.raw for w in unit.launch.words], unit.launch.start)
        first = unit.launch.words[0].line
        if after != before:
            found.append(Change(unit.site.file, first, before, after))
    for fact, edit in lines:
        change = _line(fact, edit, result)
        if change is not None:
            found.append(change)
    return _merged(found)


def _merged(changes: list[Change]) -> list[Change]:
    """Several edits of one line are not combined: only the first is certain."""
    seen: set[tuple[str, int]] = set()
    kept = []
    for change in sorted(changes, key=lambda c: (c.file, c.line)):
        if (change.file, change.line) not in seen:
            seen.add((change.file, change.line))
            kept.append(change)
    return kept


def corrected(launch: Launch, edits: list[Edit]) -> str:
    """The whole command with the edits applied."""
    drop: set[int] = set()
    replaced: dict[int, list[str]] = {}
    added: list[str] = []
    for edit in edits:
        spans = launch.spans.get(edit.setting, [])
        for start, end in spans:
            drop.update(range(start, end))
        if edit.value is None:
            continue
        words = [f"--{edit.setting.replace('_', '-')}"]
        if edit.value != "" and edit.setting not in names.flags():
            words.append(shlex.quote(edit.value))
        if spans:
            replaced[spans[0][0]] = words
        else:
            added += words
    out: list[str] = []
    start = launch.start
    for i, word in enumerate(launch.words):
        if i in replaced:
            out += replaced[i]
        elif i not in drop:
            out.append(word.raw)
    return layout([*out, *added], start)


def layout(words: list[str], start: int) -> str:
    """A command with one option per line."""
    lines: list[str] = [" ".join(words[:start])] if start else []
    for i, word in enumerate(words[start:]):
        text = word if "\n" not in word else " ".join(word.split())
        option = text.startswith("-") and not re.match(r"^-\d", text)
        if not lines:
            lines.append(text)
        elif option:
            lines.append(f"  {text}")
        else:
            lines[-1] += f" {text}"
        del i
    return " \\\n".join(line for line in lines if line.strip())


def _line(fact: Fact, edit: Edit, result: Result) -> Change | None:
    """The change of one line that sets a value, if it can be told for sure."""
    text = result.texts.get(fact.site.file, "")
    lines = text.splitlines()
    if not 0 < fact.site.line <= len(lines):
        return None
    before = lines[fact.site.line - 1]
    if edit.env and edit.value is None and _ENV_LINE.match(before) and fact.name in before:
        return Change(fact.site.file, fact.site.line, before.strip(), "")
    after = _replaced(before, fact, edit)
    return None if after is None else Change(fact.site.file, fact.site.line, before.strip(), after.strip())


def _replaced(line: str, fact: Fact, edit: Edit) -> str | None:
    """`line` with ``name = value`` changed or taken out; None if it is not plain enough."""
    written = re.escape(fact.written.lstrip("-") or fact.name)
    pattern = re.compile(
        rf"""(?P<head>(?<![\w.-])["']?{written}["']?\s*(?:=|:)\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,){{}}\[\]#"']+)"""
    )
    found = list(pattern.finditer(line))
    if len(found) != 1:
        return None
    match = found[0]
    if edit.value is not None:
        quote = match.group("value")[0] if match.group("value")[0] in "\"'" else ""
        value = edit.value or "true"
        return f"{line[: match.start('value')]}{quote}{value}{quote}{line[match.end() :]}"
    rest = line[: match.start()] + re.sub(r"^\s*,\s*", "", line[match.end() :])
    rest = re.sub(r",\s*\)", ")", rest)
    return rest if rest.strip(" \t,-") and rest.strip() not in ("export", "ENV") else ""


def words_text(words: list[Word]) -> str:
    """Words as one line."""
    return " ".join(w.raw for w in words)
