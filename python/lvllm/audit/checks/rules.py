"""The catalogue of rule rows: status, priority and texts, in ``data/rules/*.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

CATEGORIES = ("A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K")
MAXIMA = {"A": 5, "B": 6, "C": 5, "D": 6, "E": 6, "F": 4, "G": 4, "H": 7, "I": 5, "J": 4, "K": 14}
SCORED = CATEGORIES[:10]

ENABLED = "enabled"
RECOMMENDED = "recommended"
NOT_ENABLED = "not_enabled"
NOT_APPLICABLE = "not_applicable"
_STATUS = {"EN": ENABLED, "RE": RECOMMENDED, "NE": NOT_ENABLED, "NA": NOT_APPLICABLE}


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: `id` is the item with a short name (``B1.too_high``)."""

    id: str
    item: str
    status: str
    priority: str | None
    texts: dict[str, str]
    """``en``, ``zh``: the statement; ``en.change``, ``zh.change``: what to do."""
    effect: str
    risk: str
    hardware: bool
    """The row needs the GPU to be known; with low confidence it is never a P0."""

    def text(self, lang: str, part: str = "") -> str:
        key = f"{lang}.{part}" if part else lang
        return self.texts.get(key) or self.texts.get(f"en.{part}" if part else "en", "")


@dataclass(frozen=True, slots=True)
class Item:
    """A scored item or an advisory."""

    id: str
    titles: dict[str, str]

    def title(self, lang: str) -> str:
        return self.titles.get(lang) or self.titles["en"]


@cache
def _load() -> tuple[dict[str, Rule], dict[str, Item], dict[str, Any]]:
    rules: dict[str, Rule] = {}
    items: dict[str, Item] = {}
    folder = resources.files("lvllm.audit") / "data" / "rules"
    common = tomllib.loads((folder / "common.toml").read_text("utf-8"))
    for category in (*CATEGORIES, "X"):
        data = tomllib.loads((folder / f"{category}.toml").read_text("utf-8"))
        for item, body in data.items():
            if item == "version":
                continue
            title = body["title"]
            items[item] = Item(item, {"en": title[0], "zh": title[1]})
            for name, row in body.items():
                if name != "title":
                    rules[f"{item}.{name}"] = _rule(item, name, row, common)
    return rules, items, common


def _rule(item: str, name: str, row: dict[str, Any], common: dict[str, Any]) -> Rule:
    code, _, priority = str(row["is"]).partition(" ")
    texts: dict[str, str] = {}
    statement = row.get("text") or common["phrases"][row.get("say", "default")]
    texts["en"], texts["zh"] = statement
    if "change" in row:
        texts["en.change"], texts["zh.change"] = row["change"]
    return Rule(
        f"{item}.{name}", item, _STATUS[code], priority or None, texts,
        row.get("effect", ""), row.get("risk", "none"), row.get("hardware", False),
    )  # fmt: skip


def rules() -> dict[str, Rule]:
    """Every rule row by id."""
    return _load()[0]


def elsewhere(item: str) -> Rule:
    """The row of an item that cannot apply because the engine is another unit's."""
    texts = dict(zip(("en", "zh"), _load()[2]["phrases"]["elsewhere"], strict=True))
    return Rule(f"{item}.elsewhere", item, NOT_APPLICABLE, None, texts, "", "none", False)


def items() -> dict[str, Item]:
    """Every item by id, in order of category and number."""
    return _load()[1]


def phrase(section: str, key: str, lang: str) -> str:
    """A text of common.toml: ``effects``, ``risks``, ``phrases``."""
    texts = _load()[2][section].get(key)
    return "" if texts is None else str(texts[0 if lang == "en" else 1])
