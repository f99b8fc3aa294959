"""The report as JSON: keys sorted, arrays in the order of the report, one item to a line."""

from __future__ import annotations

import json
from typing import Any

_OPEN_LEVELS = 4
"""Levels that are laid out over lines; what lies deeper (items, scores) takes one line each."""


def render(tree: dict[str, Any]) -> str:
    """The tree as text."""
    return _render(tree, 0) + "\n"


def _render(value: Any, level: int) -> str:
    indent = " " * (level + 1)
    if level < _OPEN_LEVELS and isinstance(value, dict) and value:
        parts = [
            f"{json.dumps(k, ensure_ascii=False)}: {_render(value[k], level + 1)}" for k in sorted(value)
        ]
        return "{\n" + ",\n".join(indent + p for p in parts) + "\n" + indent[1:] + "}"
    if level < _OPEN_LEVELS and isinstance(value, list) and any(isinstance(v, dict) for v in value):
        parts = [_render(v, level + 1) for v in value]
        return "[\n" + ",\n".join(indent + p for p in parts) + "\n" + indent[1:] + "]"
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
