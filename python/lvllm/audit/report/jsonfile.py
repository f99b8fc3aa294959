"""The report as JSON: keys sorted, arrays in the order of the report."""

from __future__ import annotations

import json
from typing import Any


def render(tree: dict[str, Any]) -> str:
    """The tree as text; the part that only Markdown shows is left out."""
    public = {k: v for k, v in tree.items() if not k.startswith("_")}
    return json.dumps(public, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
