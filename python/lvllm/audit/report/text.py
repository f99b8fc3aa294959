"""Texts of outcomes in the language of the report."""

from __future__ import annotations

from string import Formatter

from lvllm.audit.checks.context import Outcome
from lvllm.audit.checks.rules import phrase


class _Values(Formatter):
    """`{name}` from the outcome; a missing value stays visible instead of failing."""

    def get_value(self, key: int | str, args: object, kwargs: object) -> object:
        if isinstance(kwargs, dict) and key in kwargs:
            return kwargs[key]
        return f"{{{key}}}"


_FORMATTER = _Values()


def fill(template: str, outcome: Outcome, lang: str) -> str:
    """A template with the outcome's values; values that start with ``@`` are phrases."""
    values = {}
    for key, value in outcome.values.items():
        text = str(value)
        values[key] = phrase("phrases", text[1:], lang) or text if text.startswith("@") else text
    return _FORMATTER.vformat(template, (), values)


def reason(outcome: Outcome, lang: str) -> str:
    """The statement of an outcome."""
    return fill(outcome.rule.text(lang), outcome, lang)


def change(outcome: Outcome, lang: str) -> str:
    """What to do, '' for outcomes without a suggestion."""
    return fill(outcome.rule.text(lang, "change"), outcome, lang)


def effect(outcome: Outcome, lang: str) -> str:
    return phrase("effects", outcome.rule.effect or "none", lang)


def risk(outcome: Outcome, lang: str) -> str:
    return phrase("risks", outcome.rule.risk, lang)
