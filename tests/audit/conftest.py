"""Helpers of the audit's tests: small projects on disk, one run as the command line does it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The audit needs neither vLLM nor the native module: its tests also run on a checkout that is not installed.
if importlib.util.find_spec("lvllm") is None:
    sys.path.insert(0, str(ROOT / "python"))

from lvllm.audit.cli import main  # noqa: E402


@dataclass(frozen=True)
class Run:
    """The result of one run."""

    code: int
    text: str
    error: str

    @property
    def tree(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.text)
        return loaded

    @property
    def rules(self) -> list[str]:
        """Every rule row that came out, items and advisories."""
        tree = self.tree
        return [i["rule"] for u in tree["units"] for i in u["items"]] + [
            a["rule"] for a in tree["advisories"]
        ]

    def priority(self, rule: str) -> str | None:
        tree = self.tree
        entries = [i for u in tree["units"] for i in u["items"]] + tree["advisories"]
        return next(e["priority"] for e in entries if e["rule"] == rule)


Audit = Callable[..., Run]


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Files of a small project."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, "utf-8")
    return folder


@pytest.fixture
def audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Audit:
    """``audit({"file": "text"}, "--option", …)`` runs the audit on a project of these files."""
    count = 0

    def run(files: Mapping[str, str | bytes] | Path, *options: str, format: str = "json") -> Run:
        nonlocal count
        count += 1
        path = files if isinstance(files, Path) else write(tmp_path / f"project{count}", files)
        path.mkdir(parents=True, exist_ok=True) if not path.exists() else None
        code = main([str(path), "--format", format, *options])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return run
