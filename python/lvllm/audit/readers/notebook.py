"""Jupyter notebooks: code cells as Python, ``!`` and ``%%bash`` cells as shell.

Lines are those of the notebook's JSON text, found by looking for each source line.
"""

from __future__ import annotations

import json
from typing import Any

from lvllm.audit.facts import FileFacts
from lvllm.audit.readers import launch, python


def read(text: str, file: str) -> FileFacts:
    """Units of one notebook."""
    facts = FileFacts()
    try:
        data = json.loads(text)
        cells = data["cells"] if isinstance(data, dict) else []
    except (ValueError, KeyError, RecursionError):
        facts.warnings.append(f"{file}: not readable as a notebook")
        return facts
    code: dict[int, str] = {}
    shell: dict[int, str] = {}
    at = 0
    for cell in cells if isinstance(cells, list) else []:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = _source(cell.get("source"))
        whole_shell = source.lstrip().startswith(("%%bash", "%%sh", "%%script"))
        for line in source.splitlines():
            needle = json.dumps(line)[1:-1]
            found = text.find(needle, at) if needle else -1
            at = found if found >= 0 else at
            number = text.count("\n", 0, at) + 1
            stripped = line.lstrip()
            if whole_shell and not stripped.startswith("%%"):
                shell[number] = line
            elif stripped.startswith("!"):
                shell[number] = stripped[1:]
                code.setdefault(number, line[: len(line) - len(stripped)] + "pass")
            elif stripped.startswith(("%", "?")):
                code.setdefault(number, line[: len(line) - len(stripped)] + "pass")
            else:
                code[number] = f"{code[number]}\n{line}" if number in code else line
    facts.extend(_python(code, file))
    script = _placed(shell)
    if script.strip():
        facts.extend(launch.from_script(script, launch.Context(file, "notebook")))
    return facts


def _python(code: dict[int, str], file: str) -> FileFacts:
    return python.read(_placed(code), file)


def _placed(lines: dict[int, str]) -> str:
    """Source lines at their places in the file."""
    if not lines:
        return ""
    last = max(lines)
    return "\n".join(lines.get(i, "") for i in range(1, last + 1))


def _source(value: Any) -> str:
    if isinstance(value, list):
        return "".join(str(v) for v in value)
    return value if isinstance(value, str) else ""
