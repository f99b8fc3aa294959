"""Joining what the files say: configuration files, sourced variables, wrapping units, services."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field

from lvllm.audit import names
from lvllm.audit.facts import Dependency, Fact, FileFacts, Resources, Site, State, Unit
from lvllm.audit.readers import configfile, frameworks, yamldoc
from lvllm.audit.values import boolean

MAX_WRAPS = 3
CLIENTS = ("trl", "swift")
"""Frameworks whose trainer can talk to a server of its own."""
OWN_SERVERS = ("trl vllm-serve", "swift rollout")


@dataclass(slots=True)
class Project:
    """The linked project."""

    units: list[Unit] = field(default_factory=list)
    dependencies: list[Dependency] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    secrets: list[Fact] = field(default_factory=list)
    env: list[Fact] = field(default_factory=list)
    hints: dict[str, Site] = field(default_factory=dict)
    images: list[Fact] = field(default_factory=list)
    calls: list[Fact] = field(default_factory=list)
    other_engines: list[Site] = field(default_factory=list)
    files: frozenset[str] = frozenset()

    trainers: list[Unit] = field(default_factory=list)
    """Units that train with an engine of their own or elsewhere (TRL, ms-swift)."""
    own_servers: bool = False
    """Whether a framework's own server is started somewhere."""
    by_file: dict[str, list[Unit]] = field(default_factory=dict)


def link(facts: dict[str, FileFacts], files: Iterable[str]) -> Project:
    """One project out of the facts of its files."""
    return _Linker(facts, frozenset(files)).run()


class _Linker:
    def __init__(self, facts: dict[str, FileFacts], files: frozenset[str]) -> None:
        self.facts = facts
        self.files = files
        self.by_base: dict[str, list[str]] = {}
        for file in sorted(facts):
            self.by_base.setdefault(posixpath.basename(file), []).append(file)
        self.embedded: dict[str, list[tuple[str, int, str]]] = {}
        for file, found in sorted(facts.items()):
            for name, (line, text) in found.embedded.items():
                self.embedded.setdefault(name, []).append((file, line, text))
        self.consumed: set[int] = set()
        self.configs_used: set[str] = set()

    def resolve(self, reference: str, file: str) -> str | None:
        """The project file that a reference means, or None."""
        clean = reference.strip("\"'").removeprefix("./")
        folder = posixpath.dirname(file)
        for candidate in (posixpath.join(folder, clean), clean):
            path = posixpath.normpath(candidate)
            if path in self.facts:
                return path
        same = self.by_base.get(posixpath.basename(clean), [])
        near = [f for f in same if posixpath.dirname(f) == folder] or same
        return near[0] if len(near) == 1 else None

    def run(self) -> Project:
        project = Project(files=self.files)
        units = [u for _, found in sorted(self.facts.items()) for u in found.units]
        for unit in units:
            self._env_files(unit)
        for _ in range(MAX_WRAPS):
            self._wrap(units)
        units = [u for u in units if u.launcher != "script" and id(u) not in self.consumed]
        units = [u for u in (self._configuration(u) for u in units) if u is not None]
        units = [
            u
            for u in units
            if not (u.launcher in ("config", "swift", "llamafactory", "trl", "verl", "swift rlhf")
                    and u.site.file in self.configs_used and u.launch is None)
        ]  # fmt: skip
        self._services(units)
        for unit in units:
            frameworks.add_defaults(unit)
        project.units = sorted(units, key=lambda u: (u.site, u.launcher, u.name))
        for unit in project.units:
            project.by_file.setdefault(unit.site.file, []).append(unit)
        project.trainers = [u for u in project.units if u.framework in CLIENTS and not u.serves]
        project.own_servers = any(u.launcher in OWN_SERVERS for u in project.units)
        for file, found in sorted(self.facts.items()):
            project.dependencies += found.dependencies
            project.warnings += found.warnings
            project.images += found.images
            project.calls += found.calls
            project.other_engines += found.other_engines
            project.env += [found.env[k] for k in sorted(found.env)]
            for key, site in found.hints.items():
                project.hints.setdefault(key, site)
            del file
        return project

    def _env_files(self, unit: Unit) -> None:
        for reference in unit.env_refs:
            target = self.resolve(reference, unit.site.file)
            if target is not None:
                for name, fact in self.facts[target].env.items():
                    unit.env.setdefault(name, fact)

    def _wrap(self, units: list[Unit]) -> None:
        """A unit that runs a script gives its environment to the script's own units."""
        for outer in units:
            if outer.launcher != "script" or not outer.script_refs:
                continue
            target = self.resolve(outer.script_refs[0], outer.site.file)
            if target is None or target == outer.site.file:
                continue
            for inner in self.facts[target].units:
                if inner is not outer and not inner.documentation:
                    _adopt(inner, outer)

    def _configuration(self, unit: Unit) -> Unit | None:
        """Settings of ``--config FILE``; the command line wins."""
        pending = unit.keys.pop("pending", None)
        for reference in unit.config_refs:
            self._one_config(unit, reference)
        if pending is not None:
            return self._pending(unit)
        return unit

    def _one_config(self, unit: Unit, reference: Fact) -> None:
        target = self.resolve(str(reference.value), unit.site.file)
        if target is not None and unit.framework is not None:
            self.configs_used.add(target)
            unit.config_files.append(target)
            self._framework_config(unit, target)
            return
        config = self.facts[target].config if target is not None else None
        if config is None:
            config = self._embedded(str(reference.value), unit.site.file)
        if config is None or unit.framework is not None:
            return
        if target is not None:
            self.configs_used.add(target)
        for name, fact in sorted(config.items(), key=lambda item: item[1].site):
            self._config_key(unit, name, fact)
        unit.config_files += sorted({f.site.file for f in config.values()})

    def _config_key(self, unit: Unit, name: str, fact: Fact) -> None:
        # The API server module's own parser knows `--no-KEY` and takes dashed keys; `vllm serve` does not.
        if fact.value is False and (unit.launcher != "api_server" or "_" in fact.written):
            unit.dropped.append(fact)
            return
        own = unit.settings.get(name)
        if own is not None:
            if own.known and own.value != fact.value:
                unit.conflicts.append((fact, own))
            return
        negated = name.removeprefix("no_")
        if name.startswith("no_") and negated in names.options() and boolean(fact.value):
            fact = Fact(negated, False, fact.state, fact.site, fact.origin, fact.written)
            name = negated
        unit.settings[name] = fact
        if unit.strict_names and name not in names.options() and name not in names.fields():
            unit.unknown.append(fact)

    def _embedded(self, reference: str, file: str) -> dict[str, Fact] | None:
        """A ConfigMap entry of the same name, mounted as a file."""
        found = self.embedded.get(posixpath.basename(reference), [])
        folder = posixpath.dirname(file)
        near = [e for e in found if posixpath.dirname(e[0]) == folder] or found
        if not near:
            return None
        source, line, text = near[0]
        try:
            docs = yamldoc.load_all(text, line)
        except yamldoc.YamlError:
            return None
        value = docs[0].value if docs else None
        return configfile.option_file(value, docs[0].line, source) if isinstance(value, dict) else None

    def _framework_config(self, unit: Unit, target: str) -> None:
        flat = self.facts[target].flat
        assert unit.framework is not None
        made = frameworks.make_unit(unit.framework, unit.launcher, unit.site, {**flat, **unit.keys})
        if made is None:
            return
        unit.settings = {**made.settings, **unit.settings}
        unit.keys = {**made.keys, **unit.keys}

    def _pending(self, unit: Unit) -> Unit | None:
        """A framework command whose configuration file decides whether vLLM is used at all."""
        assert unit.framework is not None
        target = next((c for c in unit.config_files), None)
        if target is None:
            return None
        flat = self.facts[target].flat
        made = frameworks.make_unit(unit.framework, unit.launcher, unit.site, {**flat, **unit.keys})
        if made is None:
            return None
        made.launch, made.env, made.resources = unit.launch, unit.env, unit.resources
        made.config_files = unit.config_files
        made.documentation = unit.documentation
        return made

    def _services(self, units: list[Unit]) -> None:
        """Kubernetes services publish the containers of their folder."""
        for file, found in sorted(self.facts.items()):
            for service in found.services:
                folder = posixpath.dirname(file)
                for unit in units:
                    kubernetes = unit.image is not None and unit.image.origin == "kubernetes"
                    if kubernetes and posixpath.dirname(unit.site.file) == folder:
                        published = Fact(
                            "published",
                            service.written,
                            State.LITERAL,
                            service.site,
                            "kubernetes",
                            service.written,
                        )
                        unit.resources.published = unit.resources.published or published


def _adopt(inner: Unit, outer: Unit) -> None:
    """`inner` runs inside `outer`: outer environment below its own, outer limits and image."""
    inner.env = {**outer.env, **inner.env}
    for key, fact in outer.keys.items():
        inner.keys.setdefault(key, fact)
    inner.image = inner.image or outer.image
    inner.name = inner.name or outer.name
    inner.env_refs += [r for r in outer.env_refs if r not in inner.env_refs]
    inner.resources = _merged(inner.resources, outer.resources)
    for key, site in outer.hints.items():
        inner.hints.setdefault(key, site)


def _merged(inner: Resources, outer: Resources) -> Resources:
    return Resources(
        cpus=inner.cpus or outer.cpus,
        memory_gib=inner.memory_gib or outer.memory_gib,
        gpus=inner.gpus or outer.gpus,
        gpu_name=inner.gpu_name or outer.gpu_name,
        cpuset=inner.cpuset or outer.cpuset,
        numa_policy=inner.numa_policy or outer.numa_policy,
        memlock=inner.memlock or outer.memlock,
        cap_add=inner.cap_add or outer.cap_add,
        privileged=inner.privileged or outer.privileged,
        container=inner.container or outer.container,
        published=inner.published or outer.published,
    )
