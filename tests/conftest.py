"""Shared by all Python tests."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a minute or more; `make test-all` runs it")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests decide every setting themselves; LVLLM_ISA of a CI run on other kernels stays."""
    import os

    for name in list(os.environ):
        if name.startswith(("LVLLM_", "LK_")) and name != "LVLLM_ISA":
            monkeypatch.delenv(name)
