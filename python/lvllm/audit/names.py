"""The names table of the reference vLLM and the data files of the rules, read once.

A new vLLM release means a new ``data/names-*.json`` (written by
``tools/make_audit_names.py``) and edits of the TOML files; no code.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib import resources
from typing import Any

_DATA = resources.files("lvllm.audit") / "data"


@cache
def table(name: str) -> dict[str, Any]:
    """``data/NAME.toml``."""
    return tomllib.loads((_DATA / f"{name}.toml").read_text("utf-8"))


@cache
def names() -> dict[str, Any]:
    """The newest names table: engine fields with defaults, options, environment variables."""
    files = sorted(
        (f for f in _DATA.iterdir() if f.name.startswith("names-")),
        key=lambda f: [int(p) for p in f.name[6:-5].split(".")],
    )
    loaded: dict[str, Any] = json.loads(files[-1].read_text("utf-8"))
    return loaded


def reference() -> str:
    """The vLLM release that the rules were checked against."""
    return str(names()["vllm"])


@cache
def fields() -> dict[str, Any]:
    """Engine-argument fields → literal default ('?' = computed)."""
    found: dict[str, Any] = names()["engine_fields"]
    return found


@cache
def options() -> frozenset[str]:
    """Every option of ``vllm serve``, as field names."""
    return frozenset(o[2:].replace("-", "_") for o in names()["engine_options"] + names()["serve_options"])


@cache
def keywords() -> frozenset[str]:
    """Keywords that ``LLM(...)`` and the engine-argument classes take."""
    return frozenset(fields()) | frozenset(table("options")["detect"]["offline_keywords"])


@cache
def environment() -> frozenset[str]:
    return frozenset(names()["environment"])


@cache
def flags() -> frozenset[str]:
    """Options that take no value."""
    return frozenset(k for k, v in fields().items() if isinstance(v, bool)) | frozenset(
        table("options")["flags"]
    )


@cache
def list_options() -> frozenset[str]:
    return frozenset(table("options")["lists"])


@cache
def distinctive() -> frozenset[str]:
    return frozenset(table("options")["detect"]["distinctive"])


@cache
def removed(section: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = table("removed")[section]
    return found


def choices(name: str) -> list[str]:
    found: list[str] = table("options")["choices"][name]
    return found


def since(name: str) -> str:
    return str(table("options")["since"][name])


def field_name(option: str) -> str:
    """``--max-model-len`` or ``max-model-len`` as an engine-argument field name, aliases resolved."""
    name = option.removeprefix("--").replace("-", "_")
    alias: dict[str, str] = table("options")["alias"]
    return alias.get(name, name)


def unabbreviated(name: str) -> str:
    """The option that `name` is an unambiguous beginning of, as argparse takes it; else `name`."""
    if is_setting(name) or len(name) < 3:
        return name
    found = [o for o in options() if o.startswith(name)]
    return found[0] if len(found) == 1 else name


def is_setting(name: str) -> bool:
    """True for a name that vLLM knows or once knew."""
    return name in fields() or name in options() or name in removed("options")
