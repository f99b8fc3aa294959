"""What a check sees: one unit with its effective settings, model, hardware and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lvllm.audit import capacity, modes, names
from lvllm.audit.checks.rules import RECOMMENDED as RECOMMENDED
from lvllm.audit.checks.rules import Rule, rules
from lvllm.audit.facts import Fact, Site, State, Unit, Value
from lvllm.audit.hardware import Hardware
from lvllm.audit.link import Project
from lvllm.audit.model import Model
from lvllm.audit.secrets import MASK, secret_name
from lvllm.audit.values import boolean, number
from lvllm.audit.versions import Declared, parse

REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Edit:
    """A definite change of one setting: `value` None = remove it; `add` = it is not there yet."""

    setting: str
    value: str | None
    env: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of a check or one advisory."""

    rule: Rule
    values: dict[str, object] = field(default_factory=dict)
    evidence: list[Site] = field(default_factory=list)
    priority: str | None = None
    current: str | None = None
    suggested: str | None = None
    edits: list[Edit] = field(default_factory=list)
    advisories: list[Outcome] = field(default_factory=list)

    @property
    def status(self) -> str:
        return self.rule.status


@dataclass(slots=True)
class Context:
    """Everything the checks of one unit may read."""

    unit: Unit
    project: Project
    mode: str
    hybrid: bool
    hybrid_shown: bool
    model: Model | None
    hardware: Hardware
    version: Declared
    goal: str
    units: Sequence[Unit] = ()
    read: Callable[[str], str | None] = lambda _path: None

    @property
    def others(self) -> Iterator[Unit]:
        """The other units of the project."""
        return (u for u in self.units if u is not self.unit)

    @property
    def neighbours(self) -> list[Unit]:
        """The other units of the same file."""
        return [u for u in self.project.by_file.get(self.unit.site.file, []) if u is not self.unit]

    # -- settings ----------------------------------------------------------------------------------

    def fact(self, name: str) -> Fact | None:
        return self.unit.settings.get(name)

    def env(self, name: str) -> Fact | None:
        """A variable that is set to something other than the empty string."""
        found = self.unit.env.get(name)
        return None if found is not None and found.known and found.value in ("", None) else found

    def key(self, name: str) -> Fact | None:
        return self.unit.keys.get(name)

    def has(self, name: str) -> bool:
        return name in self.unit.settings

    def value(self, name: str) -> Value:
        """The known value, or None."""
        found = self.unit.settings.get(name)
        return found.value if found is not None and found.known else None

    def num(self, name: str) -> float | None:
        return number(self.value(name))

    def flag(self, name: str) -> bool | None:
        return boolean(self.value(name))

    def text(self, name: str) -> str | None:
        found = self.value(name)
        return found if isinstance(found, str) and found else None

    def env_text(self, name: str) -> str | None:
        found = self.env(name)
        return None if found is None or not found.known else str(found.value).strip()

    def env_flag(self, name: str) -> bool | None:
        return boolean(self.env_text(name))

    def mapping(self, name: str) -> dict[str, Value]:
        found = self.value(name)
        return found if isinstance(found, dict) else {}

    def compilation(self, key: str) -> Value:
        """A key of ``compilation_config``."""
        return self.mapping("compilation_config").get(key)

    # -- derived -----------------------------------------------------------------------------------

    @property
    def serve(self) -> bool:
        return self.unit.serves and self.mode in (modes.SERVE, modes.SERVER, modes.FRAMEWORK)

    @property
    def offline(self) -> bool:
        return not self.unit.serves

    @property
    def rlhf(self) -> bool:
        return self.mode in (modes.COLOCATE, modes.SERVER)

    @property
    def colocate(self) -> bool:
        return self.mode == modes.COLOCATE

    @property
    def client(self) -> bool:
        """A trainer whose engine is a server of its own."""
        own = self.unit.framework in ("trl", "swift") and not self.unit.serves
        return own and self.mode == modes.SERVER

    @property
    def command_line(self) -> bool:
        return self.unit.launch is not None

    def size(self, name: str) -> int:
        """A parallel size, 1 if unset or unknown."""
        found = self.num(name)
        return int(found) if found is not None and found >= 1 else 1

    @property
    def tp(self) -> int:
        return self.size("tensor_parallel_size")

    @property
    def pp(self) -> int:
        return self.size("pipeline_parallel_size")

    @property
    def dp(self) -> int:
        return self.size("data_parallel_size")

    def sizes_known(self) -> bool:
        """False if any parallel size is set to something unknown."""
        dims = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return all(self.fact(d) is None or self.num(d) is not None for d in dims)

    def since(self, name: str) -> str:
        return names.since(name)

    def gone(self, release: str) -> bool:
        """True if the declared (else the reference) release no longer has it."""
        return self.version.at_least(release)

    @property
    def fraction(self) -> float:
        """The memory fraction in force."""
        set_to = self.num("gpu_memory_utilization")
        if set_to is not None:
            return set_to
        defaults = names.table("options")["defaults"]
        old = self.version.below(defaults["gpu_memory_utilization_since"])
        return float(defaults["gpu_memory_utilization_old" if old else "gpu_memory_utilization"])

    @property
    def model_limit(self) -> int | None:
        return self.model.context if self.model is not None else None

    @property
    def max_len(self) -> float | None:
        """The length in force, if known."""
        fact = self.fact("max_model_len")
        if fact is None:
            return self.model_limit
        set_to = self.num("max_model_len")
        return None if set_to is None or set_to < 1 else set_to

    @property
    def estimate(self) -> capacity.Estimate | None:
        """B-estimate of one GPU."""
        if self.model is None or self.hardware.gib is None or not self.sizes_known():
            return None
        fact = self.fact("gpu_memory_utilization")
        if fact is not None and not fact.known:
            return None
        online = self.text("quantization")
        widths = names.table("models")["bytes_per_param"]
        shrunk = widths["fp8"] if online in names.choices("quantization_online") else None
        if self.model.quantized is not None:
            shrunk = None
        return capacity.estimate(
            self.model, self.hardware.gib, self.fraction, tp=self.tp, pp=self.pp,
            kv=self.text("kv_cache_dtype"), bytes_per_param=shrunk,
            host_experts=self.hybrid and bool(self.model.moe),
        )  # fmt: skip

    @property
    def moe(self) -> bool | None:
        return None if self.model is None else self.model.moe

    @property
    def quantized(self) -> str | None:
        return self.model.quantized if self.model is not None else None

    def budget(self, key: str) -> int | None:
        """Default token budget (``llm``, ``serve``) or concurrency (``seqs``) of the GPU; None = unknown."""
        gpu = self.hardware.gpu
        if gpu is None:
            return None
        for row in names.table("options")["budget"]:
            if gpu.gib >= row["min_gib"] and not any(n in gpu.name for n in row.get("not", [])):
                factor = 2 if self.text("performance_mode") == "throughput" else 1
                return int(row[key]) * factor
        return None

    @property
    def token_budget(self) -> float | None:
        """``max_num_batched_tokens`` in force, if known."""
        if self.has("max_num_batched_tokens"):
            return self.num("max_num_batched_tokens")
        return self.budget("serve" if self.unit.serves else "llm")

    def exposed(self) -> Fact | None:
        """Why the server is reachable from outside, or None: public host or a published port."""
        host = self.fact("host")
        if host is not None and host.known and host.value in ("0.0.0.0", "::", "[::]"):
            return host
        if self.unit.resources.published is not None:
            local = host is not None and host.known and host.value in ("127.0.0.1", "localhost", "::1")
            return None if local else self.unit.resources.published
        return None

    def protected(self) -> bool:
        """An API key or a proxy in front."""
        if self.has("api_key") or self.unit.env.get("VLLM_API_KEY") is not None:
            return True
        if self.has("ssl_cert_reqs") or self.has("middleware"):
            return True
        return "reverse_proxy" in self.unit.hints or "reverse_proxy" in self.project.hints

    def hint(self, name: str) -> Site | None:
        return self.unit.hints.get(name) or self.project.hints.get(name)

    # -- outcomes ----------------------------------------------------------------------------------

    def out(
        self,
        rule_id: str,
        *evidence: Fact | Site | None,
        edits: Sequence[Edit] = (),
        advisories: Sequence[Outcome] = (),
        found: Mapping[str, object] | None = None,
        **values: object,
    ) -> Outcome:
        """The outcome of a rule row; the priority is lowered where the evidence does not carry a P0.

        `values` (and `found`) fill the texts of the row.
        """
        rule = rules()[rule_id]
        values.update(found or {})
        facts = [e for e in evidence if isinstance(e, Fact)]
        sites = [e.site if isinstance(e, Fact) else e for e in evidence if e is not None]
        priority = rule.priority
        if priority == "P0" and self._weak(rule, facts):
            priority = "P1"
        shown = next((f for f in facts), None)
        current = None
        if shown is not None and shown.state is not State.FRAMEWORK:
            current = f"{shown.written or shown.name} = {show(shown)}"
        elif shown is not None:
            current = f"{shown.name} = {show(shown)} ({shown.origin})"
        if shown is not None:
            values.setdefault("name", shown.written or shown.name)
            values.setdefault("value", show(shown))
        unique = sorted({s for s in sites if s.line > 0}, key=lambda s: sites.index(s))
        outcome = Outcome(rule, values, unique, priority, current, None, list(edits), list(advisories))
        return outcome

    def _weak(self, rule: Rule, facts: Sequence[Fact]) -> bool:
        """Documentation, dynamic values and guessed hardware never make a P0."""
        if self.unit.documentation:
            return True
        if facts and all(f.documentation or not f.known for f in facts):
            return True
        return rule.hardware and self.hardware.low_confidence


def show(fact: Fact) -> str:
    """A value for people; a secret's is never shown."""
    if secret_name(fact.name):
        return MASK
    if not fact.known:
        return "(unknown)"
    if isinstance(fact.value, bool):
        return "true" if fact.value else "false"
    if fact.value is None:
        return "null"
    text = str(fact.value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def release_before(a: str, b: str) -> bool:
    return parse(a) < parse(b)


def with_priority(outcome: Outcome, priority: str) -> Outcome:
    return replace(outcome, priority=priority)


def each(context: Context, *names_: str) -> Iterator[Fact]:
    """The facts of the named settings that are set."""
    for name in names_:
        found = context.fact(name)
        if found is not None:
            yield found
