"""What the readers find: settings, environment and the units that start an engine.

A *unit* is one place that starts an engine: one ``LLM(...)`` call, one launch
line, one compose service, one training configuration. Readers produce units,
`lvllm.audit.link` joins those that wrap each other, and the checks only ever see
the linked result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Value = Any
"""A plain JSON value: None, bool, int, float, str, list or dict."""


class State(StrEnum):
    """How far a value can be trusted."""

    LITERAL = "literal"
    DEFAULT_OF = "default_of"
    """The default of a variable or an argument that a caller may override."""
    DYNAMIC = "dynamic"
    """Set, value unknown. Never the reason of a P0."""
    FRAMEWORK = "framework_default"
    """Not written anywhere: the documented default of the framework in use."""
    GIVEN = "given"
    """Given on the audit's own command line."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A place in the project. `file` is relative to the audited path, `line` counts from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Fact:
    """One named value with its place.

    `name` is normalised (engine-argument field name or variable name), `written`
    is how the project spells it (``--swap-space``, ``vllm_maxlen``).
    """

    name: str
    value: Value
    state: State
    site: Site
    origin: str
    written: str = ""
    documentation: bool = False

    @property
    def known(self) -> bool:
        return self.state is not State.DYNAMIC


@dataclass(frozen=True, slots=True)
class Word:
    """One shell word: the text as written, the expanded value and how it was obtained."""

    value: str
    raw: str
    line: int
    state: State = State.LITERAL


@dataclass(slots=True)
class Launch:
    """A command that starts an engine.

    `words` is the whole command, wrappers included; `start` is the index of the
    first word after the launcher, `spans` maps a setting to the half-open ranges
    of words that give it, so that a corrected command can be printed.
    """

    words: list[Word]
    start: int
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    env_words: list[Word] = field(default_factory=list)

    @property
    def wrappers(self) -> list[str]:
        return [w.value for w in self.words[: self.start]]


@dataclass(slots=True)
class Resources:
    """What a container or a service manager gives to a unit. None = not stated."""

    cpus: Fact | None = None
    memory_gib: Fact | None = None
    gpus: Fact | None = None
    gpu_name: Fact | None = None
    cpuset: Fact | None = None
    numa_policy: Fact | None = None
    memlock: Fact | None = None
    cap_add: tuple[str, ...] = ()
    privileged: bool = False
    container: bool = False
    published: Fact | None = None
    """A published port, a load balancer or a node port."""


@dataclass(slots=True)
class Unit:
    """One place that starts an engine."""

    launcher: str
    """``vllm serve``, ``LLM``, ``trl``, ``verl``, ``openrlhf``, ``swift``, ``llamafactory``, …"""
    site: Site
    serves: bool = False
    name: str = ""
    framework: str | None = None
    settings: dict[str, Fact] = field(default_factory=dict)
    env: dict[str, Fact] = field(default_factory=dict)
    keys: dict[str, Fact] = field(default_factory=dict)
    """Framework keys that are no engine settings (``vllm_mode``, ``sleep_level``, …)."""
    unknown: list[Fact] = field(default_factory=list)
    """Options and keywords that the reference version does not have."""
    dropped: list[Fact] = field(default_factory=list)
    """``key: false`` lines of a configuration file, which stock vLLM does not pass on."""
    conflicts: list[tuple[Fact, Fact]] = field(default_factory=list)
    """(file value, command-line value) that differ."""
    sampling: list[Fact] = field(default_factory=list)
    calls: list[Fact] = field(default_factory=list)
    """Behaviour: ``sleep``, ``wake_up``, ``generate``, ``optimizer_step``, …"""
    image: Fact | None = None
    launch: Launch | None = None
    resources: Resources = field(default_factory=Resources)
    config_refs: list[Fact] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)
    env_refs: list[str] = field(default_factory=list)
    script_refs: list[str] = field(default_factory=list)
    documentation: bool = False
    strict_names: bool = False
    """The launcher is vLLM itself, so an unknown option is an error."""
    main_guard: bool | None = None
    hints: dict[str, Site] = field(default_factory=dict)
    """Evidence words: ``agent``, ``high_rate``, ``reverse_proxy``, …"""

    @property
    def id(self) -> str:
        return f"{self.site.file}:{self.site.line}"

    def files(self) -> list[str]:
        """Every file that contributes, in sorted order."""
        found = {self.site.file, *self.config_files}
        for fact in (*self.settings.values(), *self.env.values(), *self.keys.values()):
            if fact.site.line > 0:
                found.add(fact.site.file)
        return sorted(f for f in found if f)

    def called(self, *names: str) -> list[Fact]:
        return [c for c in self.calls if c.name in names]


@dataclass(frozen=True, slots=True)
class Dependency:
    """A package named by a requirements or lock file."""

    name: str
    kind: str
    """``lock``, ``pin``, ``range``, ``url`` or ``any``."""
    version: str
    """The version (lock, pin), the specifier (range) or the address (url)."""
    site: Site


@dataclass(slots=True)
class FileFacts:
    """Everything one file says."""

    units: list[Unit] = field(default_factory=list)
    env: dict[str, Fact] = field(default_factory=dict)
    """Variables that a unit may load by naming this file (``.env``, sourced scripts)."""
    dependencies: list[Dependency] = field(default_factory=list)
    secrets: list[Fact] = field(default_factory=list)
    config: dict[str, Fact] | None = None
    """Option-like keys of a YAML file, for ``--config FILE``."""
    flat: dict[str, Fact] = field(default_factory=dict)
    """The same file as dotted keys, for frameworks that are given it on a command line."""
    embedded: dict[str, tuple[int, str]] = field(default_factory=dict)
    """ConfigMap entries: file name → (first line, text)."""
    images: list[Fact] = field(default_factory=list)
    hints: dict[str, Site] = field(default_factory=dict)
    calls: list[Fact] = field(default_factory=list)
    other_engines: list[Site] = field(default_factory=list)
    """Uses of an engine that is not vLLM, for the hint of exit code 3."""
    services: list[Fact] = field(default_factory=list)
    """Kubernetes services that expose pods: value = selector labels."""
    warnings: list[str] = field(default_factory=list)

    def extend(self, other: FileFacts) -> None:
        self.units += other.units
        self.env.update(other.env)
        self.dependencies += other.dependencies
        self.secrets += other.secrets
        if other.config is not None:
            self.config = other.config
        self.flat.update(other.flat)
        self.embedded.update(other.embedded)
        self.images += other.images
        for key, site in other.hints.items():
            self.hints.setdefault(key, site)
        self.calls += other.calls
        self.other_engines += other.other_engines
        self.services += other.services
        self.warnings += other.warnings


def first(facts: Iterable[Fact]) -> Fact | None:
    """The first fact, or None."""
    return next(iter(facts), None)
