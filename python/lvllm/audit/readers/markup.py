"""Markdown and reStructuredText: only fenced or literal shell and Python blocks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from lvllm.audit.facts import FileFacts
from lvllm.audit.readers import launch, python

_SHELL = ("bash", "sh", "shell", "console", "shell-session", "zsh", "")
_PYTHON = ("python", "py", "python3")


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """(language, first line, text) of every block."""
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        stripped = lines[i].strip()
        if stripped.startswith(("```", "~~~")):
            fence = stripped[:3]
            language = stripped.strip("`~ ").split(" ")[0].split("{")[0].lower()
            start = i + 1
            i = start
            while i < len(lines) and not lines[i].strip().startswith(fence):
                i += 1
            yield language, start + 1, textwrap.dedent("\n".join(lines[start:i]))
        elif stripped.startswith((".. code-block::", ".. code::", ".. sourcecode::")):
            language = stripped.rpartition("::")[2].strip().lower()
            start = i + 1
            i = start
            while i < len(lines) and (not lines[i].strip() or lines[i].startswith((" ", "\t"))):
                i += 1
            body = [line if not line.strip().startswith(":") else "" for line in lines[start:i]]
            yield language, start + 1, textwrap.dedent("\n".join(body))
            continue
        i += 1


def read(text: str, file: str) -> FileFacts:
    """Units shown by a document; they never make a P0 on their own."""
    facts = FileFacts()
    for language, line, body in blocks(text):
        if "vllm" not in body:
            continue
        if language in _SHELL:
            prompt = "\n".join(
                row[2:] if row.startswith(("$ ", "# ", "> ")) and not row.startswith("# ") else row
                for row in body.split("\n")
            )
            found = launch.from_script(prompt, launch.Context(file, "documentation", True), line)
            facts.units += found.units
        elif language in _PYTHON:
            facts.units += python.read(body, file, first_line=line, documentation=True).units
    for unit in facts.units:
        unit.documentation = True
    return facts
