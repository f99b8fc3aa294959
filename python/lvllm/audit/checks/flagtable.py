"""The engine's own table of flags (`lvllm.flags`), read by its own parser (`lvllm.envs`).

Nothing about a flag is repeated here: names, aliases, defaults and legal values are
those of the engine, so the audit says what the engine would say at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lvllm import envs, flags
from lvllm.audit.checks.context import Context
from lvllm.audit.facts import Fact

PREFIXES = ("LVLLM_", "LK_")
SWITCH = flags.FLAGS[0].name
_FLAGS = {name: flag for flag in flags.FLAGS for name in (flag.name, *flag.aliases)}


@dataclass(frozen=True, slots=True)
class Reading:
    """What the engine makes of one flag: `fact` None = unset, `error` = why it would refuse to start."""

    fact: Fact | None
    value: Any
    error: str | None = None

    @property
    def unset(self) -> bool:
        return self.fact is None


def known_names() -> list[str]:
    """Every name that the engine accepts."""
    return [*_FLAGS, *flags.NO_EFFECT, flags.INHERITED_CPUS]


def no_effect() -> dict[str, str]:
    return flags.NO_EFFECT


def hybrid_facts(c: Context) -> list[Fact]:
    """Every variable of the hybrid engine that the unit sets, by name."""
    return [f for n, f in sorted(c.unit.env.items()) if n.startswith(PREFIXES)]


def read(c: Context, name: str) -> Reading:
    """A flag of the unit, whichever alias or ``additional_config`` gives it; the environment wins."""
    flag = _FLAGS[name]
    for spelled in (flag.name, *flag.aliases):
        fact = c.env(spelled)
        if fact is None:
            continue
        if not fact.known:
            return Reading(fact, None)
        return _parsed(flag, fact, {spelled: str(fact.value)}, None)
    section = c.mapping("additional_config").get(envs.CONFIG_SECTION)
    if isinstance(section, dict):
        for key, value in section.items():
            if key.lower() == flag.key or key.upper() in (flag.name, *flag.aliases):
                found = c.fact("additional_config")
                assert found is not None
                return _parsed(flag, found, {}, {key: value})
    return Reading(None, flag.default)


def _parsed(flag: flags.Flag, fact: Fact, environ: dict[str, str], section: dict[str, Any] | None) -> Reading:
    try:
        settings = envs.load(section, environ)
    except envs.SettingError as error:
        return Reading(fact, None, str(error).rstrip("."))
    return Reading(fact, getattr(settings, flag.key))


def switch_on(c: Context) -> bool:
    """Whether the engine would be active. ``lvllm serve`` turns the switch on itself."""
    reading = read(c, SWITCH)
    if reading.fact is None and c.unit.launcher == "lvllm serve":
        return True
    return reading.value is True


def notices(c: Context) -> list[tuple[str, Fact | None]]:
    """The engine's own notices for the unit's settings, each with the variable that it names.

    Names that are accepted without effect are left to K14. Nothing is said when a value is illegal:
    the check that owns the flag reports that.
    """
    facts = {f.name: f for f in hybrid_facts(c) if f.known and f.name in _FLAGS}
    try:
        settings = envs.load(None, {name: str(fact.value) for name, fact in facts.items()})
    except envs.SettingError:
        return []
    found = []
    for line in envs.notices(settings, on_gpu=True):
        named = next((f for n, f in sorted(facts.items(), key=lambda kv: -len(kv[0])) if n in line), None)
        found.append((line, named))
    return found
