"""From a path to the audited units: scan, read, link, check."""

from __future__ import annotations

import fnmatch
import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lvllm.audit import hardware, modes, versions
from lvllm.audit import model as models
from lvllm.audit.checks.context import Context, Outcome
from lvllm.audit.checks.hybrid import fits_host_only
from lvllm.audit.checks.registry import advisories, checks
from lvllm.audit.checks.rules import ENABLED, NOT_APPLICABLE, NOT_ENABLED, RECOMMENDED, elsewhere, rules
from lvllm.audit.facts import Fact, FileFacts, Site, State, Unit
from lvllm.audit.link import Project, link
from lvllm.audit.readers import dispatch
from lvllm.audit.scan import Scan, tracked
from lvllm.audit.secrets import Vault, placeholder, secret_name

_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|ghp_[A-Za-z0-9]{30,})\b")
MAX_INDEX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    path: Path
    vllm_version: str | None = None
    given: hardware.Given = field(default_factory=hardware.Given)
    model: str | None = None
    mode: str | None = None
    goal: str = "balanced"
    categories: tuple[str, ...] = ()
    unit: str | None = None
    max_files: int = 20_000
    exclude: tuple[str, ...] = ()
    lang: str = "en"


@dataclass(slots=True)
class Audited:
    """One unit with its results."""

    context: Context
    items: dict[str, Outcome] = field(default_factory=dict)
    notes: list[Outcome] = field(default_factory=list)

    @property
    def unit(self) -> Unit:
        return self.context.unit

    def outcomes(self) -> list[Outcome]:
        return [*self.items.values(), *self.notes]

    def score(self, category: str) -> tuple[int, int, int]:
        """(points, applicable, recommended) of a category."""
        own = [o for i, o in self.items.items() if i[0] == category]
        return (
            sum(o.status == ENABLED for o in own),
            sum(o.status != NOT_APPLICABLE for o in own),
            sum(o.status == RECOMMENDED for o in own),
        )

    def not_enabled(self, categories: Sequence[str]) -> int:
        return sum(o.status == NOT_ENABLED for i, o in self.items.items() if i[0] in categories)


@dataclass(slots=True)
class Result:
    """The whole audit."""

    request: Request
    scan: Scan
    project: Project
    units: list[Audited] = field(default_factory=list)
    advisories: list[Outcome] = field(default_factory=list)
    parsed: int = 0
    failed: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    vault: Vault = field(default_factory=Vault)
    _lines: dict[str, list[str]] = field(default_factory=dict)

    def line(self, site: Site) -> str:
        """The source line of a place, secrets masked."""
        lines = self._lines.get(site.file)
        if lines is None:
            lines = self._lines[site.file] = self.texts.get(site.file, "").splitlines()
        text = lines[site.line - 1].strip() if 0 < site.line <= len(lines) else ""
        return self.vault.mask(text[:300])


def run(request: Request) -> Result:
    """Audit a path. Raises OSError if it cannot be read at all."""
    path = request.path
    if not path.exists():
        raise FileNotFoundError(str(path))
    scan = Scan(path, request.max_files, request.exclude)
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are many and without cycles: collecting them costs a fifth of the time
    try:
        facts, result = _read(scan, request)
    finally:
        if collecting:
            gc.enable()
    result.project = link(facts, facts)
    _learn_secrets(result)
    result.units = _audit(result, request)
    result.advisories = _secrets(result)
    return result


def _read(scan: Scan, request: Request) -> tuple[dict[str, FileFacts], Result]:
    reader = _Reader(scan, Result(request, scan, Project()))
    for file in scan.files():
        kind = dispatch.kind(file.rsplit("/", 1)[-1])
        if kind is not None:
            reader.read(file, kind)
    reader.referenced()
    return dict(sorted(reader.facts.items())), reader.result


class _Reader:
    """Reads the files that matter; what is only named by another file is read when it is named."""

    def __init__(self, scan: Scan, result: Result) -> None:
        self.scan, self.result = scan, result
        self.facts: dict[str, FileFacts] = {}
        self.env_of: dict[str, dict[str, Fact]] = {}
        self.passed_over: dict[str, list[tuple[str, str]]] = {}

    def read(self, file: str, kind: str, *, named: bool = False) -> None:
        data = self.scan.read(file)
        if data is None:
            return
        base = file.rsplit("/", 1)[-1]
        if not named and not dispatch.relevant(kind, data):
            if kind in ("yaml", "json", "toml", "shell"):
                self.passed_over.setdefault(base, []).append((file, kind))
            return
        text = data.decode("utf-8", "replace").removeprefix("\ufeff").replace("\r\n", "\n")
        folder = file.rpartition("/")[0]
        if kind == "env" and base == ".env":
            self.env_of[folder] = dispatch.env_variables(text, file)
        try:
            found = dispatch.read(kind, text, file, self.env_of.get(folder, {}))
        except Exception as error:
            # One strange file must never end the audit; it is reported and left out.
            found = FileFacts(warnings=[f"{file}: not read ({type(error).__name__})"])
        self.result.parsed += 1
        self.result.failed += bool(found.warnings)
        self.facts[file] = found
        self.result.texts[file] = text

    def referenced(self) -> None:
        """Configuration, environment and script files that units name."""
        units = [u for found in self.facts.values() for u in found.units]
        wanted = {str(r.value).rsplit("/", 1)[-1] for u in units for r in u.config_refs}
        wanted |= {r.rsplit("/", 1)[-1] for u in units for r in (*u.env_refs, *u.script_refs)}
        for base in sorted(wanted & self.passed_over.keys()):
            for file, kind in self.passed_over[base]:
                self.read(file, kind, named=True)


def _audit(result: Result, request: Request) -> list[Audited]:
    project = result.project
    chosen: list[tuple[Unit, str]] = []
    for unit in project.units:
        mode = request.mode or modes.detect(unit, project)
        if mode is not None:
            chosen.append((unit, mode))
    if any(not u.documentation for u, _ in chosen):
        # Examples in documents only matter where nothing else starts an engine.
        chosen = [(u, m) for u, m in chosen if not u.documentation]
    if request.unit is not None:
        chosen = [(u, m) for u, m in chosen if _named(u, request.unit)]
    everything = [u for u, _ in chosen]
    audited = []
    for unit, mode in chosen:
        context = _context(unit, mode, everything, result, request)
        audited.append(_check(context, request))
    return audited


def _named(unit: Unit, pattern: str) -> bool:
    return any(fnmatch.fnmatch(text, pattern) for text in (unit.id, unit.name, unit.site.file))


def _context(unit: Unit, mode: str, units: Sequence[Unit], result: Result, request: Request) -> Context:
    if request.model is not None:
        unit.settings["model"] = Fact("model", request.model, State.GIVEN, Site("", 0), "given", "--model")
    model = models.resolve(unit.settings.get("model"), lambda p: _model_file(result, request, p))
    context = Context(
        unit, result.project, mode, modes.is_hybrid(unit, result.project), False, model,
        hardware.Hardware(), versions.of_vllm(unit, result.project.dependencies, request.vllm_version),
        request.goal, units, result.texts.get,
    )  # fmt: skip
    sizes = context.tp * context.pp * context.dp if context.sizes_known() else None
    context.hardware = hardware.detect(unit, request.given, sizes, result.texts.get)
    context.hybrid_shown = context.hybrid or fits_host_only(context)
    return context


def _model_file(result: Result, request: Request, path: str) -> str | None:
    """A file of a model folder: in the project, or below the folder given by ``--model``."""
    if path in result.texts:
        return result.texts[path]
    root = result.scan.root if result.scan.root.is_dir() else result.scan.root.parent
    given = request.model is not None and path.startswith(request.model.removeprefix("./").rstrip("/"))
    candidate = Path(path) if given else root / path
    try:
        real = candidate.resolve(strict=True)
        if not given and not real.is_relative_to(root.resolve()):
            return None
        if not real.is_file() or real.stat().st_size > MAX_INDEX_BYTES:
            return None
        return real.read_text("utf-8", "replace")
    except (OSError, ValueError, RuntimeError):
        return None


def _check(context: Context, request: Request) -> Audited:
    audited = Audited(context)
    wanted = request.categories
    for item, function in checks().items():
        if wanted and item[0] not in wanted:
            continue
        if item[0] == "K" and not context.hybrid_shown:
            continue
        served = context.client and item[0] in "ABCDEFGJ"
        outcome = Outcome(elsewhere(item)) if served else function(context)
        audited.items[item] = outcome
        audited.notes += outcome.advisories
    for collect in advisories():
        audited.notes += [o for o in collect(context) if not wanted or o.rule.item[0] in (*wanted, "X")]
    return audited


def _learn_secrets(result: Result) -> None:
    for unit in result.project.units:
        pairs = [fact for pair in unit.conflicts for fact in pair]
        for fact in (*unit.env.values(), *unit.settings.values(), *unit.keys.values(), *unit.unknown, *pairs):
            result.vault.learn_fact(fact)
    for fact in result.project.env:
        result.vault.learn_fact(fact)


def _secrets(result: Result) -> list[Outcome]:
    """X2: literal secrets in tracked files, one per place."""
    rule = rules()["X2.literal"]
    found: dict[Site, str] = {}
    facts = [*result.project.env]
    for unit in result.project.units:
        facts += [*unit.env.values(), *unit.settings.values(), *unit.keys.values()]
    for fact in facts:
        literal = isinstance(fact.value, str) and fact.state is State.LITERAL and not placeholder(fact.value)
        tests = any(part in ("test", "tests") for part in fact.site.file.split("/"))
        if (
            literal
            and not tests
            and secret_name(fact.name)
            and len(str(fact.value)) >= 6
            and not fact.documentation
        ):
            found.setdefault(fact.site, fact.name)
    for file, text in sorted(result.texts.items()):
        if file.lower().endswith((".md", ".rst")):
            continue
        for match in _TOKEN.finditer(text):
            if not placeholder(match.group(0)):
                site = Site(file, text.count("\n", 0, match.start()) + 1)
                found.setdefault(site, "access token")
    outcomes = []
    for site, name in sorted(found.items()):
        if site.line > 0 and tracked(result.scan.root, site.file):
            outcomes.append(Outcome(rule, {"name": name}, [site], rule.priority))
    return outcomes
