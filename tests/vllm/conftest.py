"""Fixtures of the tests against vLLM. Nothing here is collected where vLLM is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import StockCache


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if importlib.util.find_spec("vllm") is None else None


@pytest.fixture(scope="session", autouse=True)
def plugin_is_installed() -> None:
    names = [e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins")]
    assert "lvllm.plugin:register" in names, "install the package: vLLM finds the plugin by its entry point"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Callable[[str], Path]:
    """Folder of a tiny model of a kind, made once."""
    root = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        if not (root / kind).is_dir():
            command = [sys.executable, str(repository / "tools" / "make_tiny_moe.py"), str(root), kind]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
        return root / kind

    return make


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> StockCache:
    return StockCache(tmp_path_factory.mktemp("stock"), models)


@pytest.fixture
def copy_of(models: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a tiny model, to damage."""

    def make(kind: str) -> Path:
        target = tmp_path / kind
        shutil.copytree(models(kind), target)
        return target

    return make
