"""Which commands start an engine, and the units they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lvllm.audit.facts import Dependency, Fact, FileFacts, Launch, Site, State, Unit, Word
from lvllm.audit.readers import dockerrun, frameworks, options, shell
from lvllm.audit.readers.deps import from_pip_arguments
from lvllm.audit.values import scalar

# Commands whose arguments are text, not a program to run.
_TEXT_COMMANDS = frozenset(
    (
        "echo",
        "printf",
        "grep",
        "egrep",
        "rg",
        "pkill",
        "pgrep",
        "kill",
        "killall",
        "which",
        "cat",
        "sed",
        "awk",
        "test",
        "[",
        "[[",
        "ls",
        "cd",
        "rm",
        "cp",
        "mv",
        "git",
        "tail",
        "head",
        "ps",
        "command",
        "type",
        "alias",
        "fi",
        "log",
        "info",
        "die",
        "warn",
        "error",
        "usage",
        "logger",
    )
)
_OTHER_ENGINES = ("sglang.launch_server", "lmdeploy", "text-generation-launcher", "trtllm-serve", "ollama")
_OLD_SERVERS = ("vllm.entrypoints.api_server",)
_API_SERVERS = ("vllm.entrypoints.openai.api_server",)
_CLI_MODULES = ("vllm.entrypoints.cli.main", "vllm", "vllm.scripts")
MAX_NESTING = 3


@dataclass(slots=True)
class Context:
    """Where the commands come from."""

    file: str
    origin: str = "command line"
    documentation: bool = False
    nesting: int = 0


def from_script(text: str, context: Context, first_line: int = 1) -> FileFacts:
    """Units, exported variables and installed packages of a shell text."""
    script = shell.parse(text, first_line)
    facts = FileFacts()
    sourced: list[str] = []
    memlock: Fact | None = None
    for command in script.commands:
        values = [w.value for w in command.words]
        if values[0] in ("source", ".") and len(values) > 1:
            sourced.append(values[1])
        elif values[0] == "ulimit" and len(values) > 2 and values[1] in ("-l", "-Hl", "-Sl"):
            # In KiB, as the shell counts it.
            limit = values[2] if not values[2].isdigit() else f"{int(values[2])}KiB"
            memlock = Fact(
                "memlock", limit, State.LITERAL, Site(context.file, command.line), "shell", "ulimit -l"
            )
        found = from_command(command, context)
        for unit in found.units:
            unit.env_refs = [*sourced, *unit.env_refs]
            unit.resources.memlock = unit.resources.memlock or memlock
        facts.extend(found)
    for name, variable in sorted(script.variables.items()):
        facts.env[name] = Fact(
            name, variable.text, variable.state, Site(context.file, variable.line), "export", name,
            context.documentation,
        )  # fmt: skip
    return facts


def from_command(command: shell.Command, context: Context) -> FileFacts:
    """What one simple command says."""
    facts = FileFacts()
    words = command.words
    if command.heredoc is not None and context.nesting < MAX_NESTING:
        line, body = command.heredoc
        if any(mark in body for mark in ("vllm", "verl", "openrlhf")):
            inner = Context(context.file, context.origin, context.documentation, context.nesting + 1)
            facts.units += from_script(body, inner, line).units
    name = words[0].value.rsplit("/", 1)[-1]
    if name in _TEXT_COMMANDS or any(w.value.startswith("--help") for w in words):
        return facts
    facts.dependencies += _installed(words, context)
    unit = recognise(words, context)
    if unit is not None:
        _environment(unit, command, context)
        facts.units.append(unit)
        return facts
    facts.other_engines += [
        Site(context.file, w.line) for w in words if any(e in w.value for e in _OTHER_ENGINES)
    ][:1]
    _nested(words, command, context, facts)
    if not facts.units:
        wrapper = _script(words, context)
        if wrapper is not None:
            _environment(wrapper, command, context)
            facts.units.append(wrapper)
    _rate(words, context, facts)
    return facts


def _script(words: Sequence[Word], context: Context) -> Unit | None:
    """``python train.py``, ``bash start.sh``: joined with the script's own units later."""
    for i, word in enumerate(words):
        if word.value.endswith((".py", ".sh", ".bash")) and not word.value.startswith("-"):
            unit = Unit("script", Site(context.file, word.line), documentation=context.documentation)
            unit.script_refs.append(word.value)
            wrappers(unit, words[:i])
            return unit
    return None


def _rate(words: Sequence[Word], context: Context, facts: FileFacts) -> None:
    """``vllm bench serve`` with a high request rate says what load is expected."""
    values = [w.value for w in words]
    if "bench" not in values or "vllm" not in values:
        return
    parsed = options.parse(words, context.file, context.origin, strict=False).settings
    for name, high in (("request_rate", 16), ("max_concurrency", 64)):
        fact = parsed.get(name)
        if fact is not None and isinstance(fact.value, int | float) and fact.value >= high:
            facts.hints.setdefault("high_rate", fact.site)


def _nested(words: Sequence[Word], command: shell.Command, context: Context, facts: FileFacts) -> None:
    """``bash -c '…'``, ``ssh host "…"``, ``tmux … "…"``: a word that is itself a script."""
    if context.nesting >= MAX_NESTING:
        return
    for word in words:
        if " " not in word.value or not _mentions_launcher(word.value):
            continue
        inner = Context(context.file, context.origin, context.documentation, context.nesting + 1)
        found = from_script(word.value, inner, word.line)
        for unit in found.units:
            _environment(unit, command, context)
        facts.units += found.units


def _mentions_launcher(text: str) -> bool:
    return any(
        mark in text
        for mark in (
            "vllm serve",
            "vllm.entrypoints",
            "lvllm serve",
            "verl.trainer",
            "openrlhf.cli",
            "swift ",
            "llamafactory-cli",
            "vllm-serve",
            "vllm/vllm-openai",
        )
    )


def _environment(unit: Unit, command: shell.Command, context: Context) -> None:
    """Exports before the command, then its own prefix; the unit's own values win."""
    if unit.resources.container:
        return  # a container does not inherit the shell's environment
    outer: dict[str, Fact] = {}
    for name, variable in command.exported.items():
        outer[name] = Fact(
            name, variable.text, variable.state, Site(context.file, variable.line), "export", name,
            context.documentation,
        )  # fmt: skip
    for name, word in command.prefix.items():
        outer[name] = Fact(
            name, word.value, word.state, Site(context.file, word.line), "inline", name, context.documentation
        )
    unit.env = {**outer, **unit.env}


def _installed(words: Sequence[Word], context: Context) -> list[Dependency]:
    """``pip install vllm==…`` and ``uv pip install …``."""
    values = [w.value for w in words]
    for i, value in enumerate(values[:-1]):
        if value.rsplit("/", 1)[-1] in ("pip", "pip3") and values[i + 1] == "install":
            return from_pip_arguments(words[i + 2 :], context.file)
    return []


def recognise(words: Sequence[Word], context: Context) -> Unit | None:
    """The unit that a command starts, or None."""
    values = [w.value for w in words]
    if any(v == "docker" or v.endswith("/docker") or v in ("podman", "nerdctl") for v in values[:3]):
        unit = dockerrun.from_words(words, context.file, context.documentation, _inner(context))
        if unit is not None:
            return unit
    for i, at, launcher in (*_candidates(values), *_trl_script(values)):
        maker = _MAKERS.get(launcher, _framework(launcher))
        unit = maker(words, at, launcher, context)
        if unit is not None:
            wrappers(unit, words[:i])
            return unit
    return None


def _inner(context: Context) -> Callable[[Sequence[Word]], Unit | None]:
    return lambda words: recognise(words, context)


def _candidates(values: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """(index of the launcher's first word, index after it, launcher)."""
    for i, value in enumerate(values):
        base = value.rsplit("/", 1)[-1]
        nxt = values[i + 1] if i + 1 < len(values) else ""
        if base in ("vllm", "lvllm") and nxt == "serve":
            yield i, i + 2, f"{base} serve"
        elif base == "trl" and nxt == "vllm-serve":
            yield i, i + 2, "trl vllm-serve"
        elif base == "swift" and nxt in ("rollout", "deploy", "rlhf", "infer"):
            yield i, i + 2, f"swift {nxt}"
        elif base in ("llamafactory-cli", "llamafactory") and nxt in ("api", "chat", "train"):
            yield i, i + 2, f"llamafactory {nxt}"
        elif base in ("lm_eval", "lm-eval"):
            yield i, i + 1, "lm_eval"
        elif value == "-m" or (value.startswith("-m") and "." in value):
            module = nxt if value == "-m" else value[2:]
            after = i + 2 if value == "-m" else i + 1
            yield from _module(module, i, after, values)


def _trl_script(values: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """A training script that takes TRL's own options on its command line."""
    if any(v.partition("=")[0] in ("--use_vllm", "--use-vllm") for v in values):
        for i, value in enumerate(values):
            if value.endswith(".py") or value == "trl":
                swift = "swift" in value or any(v.startswith(("--rlhf_type", "--rlhf-type")) for v in values)
                yield i, i + 1, "swift rlhf" if swift else "trl"
                return


def _module(module: str, i: int, after: int, values: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    if module in _API_SERVERS:
        yield i, after, "api_server"
    elif module in _OLD_SERVERS:
        yield i, after, "old api_server"
    elif module in _CLI_MODULES and after < len(values) and values[after] == "serve":
        yield i, after + 1, "vllm serve"
    elif module == "trl.scripts.vllm_serve":
        yield i, after, "trl vllm-serve"
    elif module == "openrlhf.cli.train_ppo_ray":
        yield i, after, "openrlhf"
    elif module.startswith("verl.trainer."):
        yield i, after, "verl"
    elif module == "lm_eval":
        yield i, after, "lm_eval"


def _vllm(words: Sequence[Word], at: int, launcher: str, context: Context) -> Unit | None:
    """``vllm serve``, ``lvllm serve`` and the API server modules."""
    words = list(words)
    if any(w.value in ("-h", "--help") for w in words[at:]):
        return None
    parsed = options.parse(
        words, context.file, context.origin, start=at, strict=launcher != "old api_server",
        documentation=context.documentation,
    )  # fmt: skip
    line = words[at - 1].line
    unit = Unit(launcher, Site(context.file, line), serves=True, documentation=context.documentation)
    unit.settings = parsed.settings
    unit.unknown = parsed.unknown
    unit.strict_names = launcher != "old api_server"
    unit.launch = Launch(list(words), at, parsed.spans)
    options.take_config(unit)
    model = next((w for i, w in parsed.positional if i == at), None)
    if model is None:
        model = next((w for _, w in parsed.positional if not w.raw.startswith(("$@", '"$@', "$*"))), None)
    if model is not None and launcher.endswith("serve"):
        value = None if model.state is State.DYNAMIC else model.value
        unit.settings["model"] = Fact(
            "model", value, model.state, Site(context.file, model.line), context.origin, "model",
            context.documentation,
        )  # fmt: skip
    return unit


def _trl_serve(words: Sequence[Word], at: int, launcher: str, context: Context) -> Unit | None:
    parsed = options.parse(
        words, context.file, context.origin, start=at, strict=False, documentation=context.documentation
    )
    unit = Unit("trl vllm-serve", Site(context.file, words[at - 1].line), serves=True, framework="trl")
    unit.documentation = context.documentation
    unit.settings = parsed.settings
    unit.launch = Launch(list(words), at, parsed.spans)
    return unit


def _lm_eval(words: Sequence[Word], at: int, _launcher: str, context: Context) -> Unit | None:
    parsed = options.parse(words, context.file, context.origin, start=at, strict=False)
    model = parsed.settings.get("model")
    if model is None or model.value not in ("vllm", "vllm-vlm"):
        return None
    unit = Unit("lm_eval", Site(context.file, words[at - 1].line), framework="lm_eval")
    unit.documentation = context.documentation
    arguments = parsed.settings.get("model_args")
    if arguments is not None and isinstance(arguments.value, str):
        for pair in arguments.value.split(","):
            key, equals, value = pair.partition("=")
            name = "model" if key.strip() in ("pretrained", "model") else key.strip()
            if equals:
                unit.settings[name] = Fact(
                    name, scalar(value), arguments.state, arguments.site, context.origin, key.strip()
                )
    return unit


def _framework(launcher: str) -> Callable[[Sequence[Word], int, str, Context], Unit | None]:
    def make(words: Sequence[Word], at: int, name: str, context: Context) -> Unit | None:
        return frameworks.from_words(
            words, at, name, context.file, origin=context.origin, documentation=context.documentation
        )

    return make


_MAKERS: dict[str, Callable[[Sequence[Word], int, str, Context], Unit | None]] = {
    "vllm serve": _vllm,
    "lvllm serve": _vllm,
    "api_server": _vllm,
    "old api_server": _vllm,
    "trl vllm-serve": _trl_serve,
    "lm_eval": _lm_eval,
}


def wrappers(unit: Unit, before: Sequence[Word]) -> None:
    """What stands before the launcher: ``env A=b``, ``numactl``, ``taskset``, ``torchrun``."""
    values = [w.value for w in before]
    for word in before:
        name, equals, value = word.value.partition("=")
        if equals and name.isidentifier():
            unit.env[name] = Fact(name, value, word.state, Site(unit.site.file, word.line), "inline", name)
    for i, value in enumerate(values):
        if value.rsplit("/", 1)[-1] == "numactl":
            line = before[i].line
            for j in range(i + 1, len(values)):
                option, equals, nodes = values[j].partition("=")
                if option in ("--cpunodebind", "-N", "--membind", "-m"):
                    nodes = nodes if equals else (values[j + 1] if j + 1 < len(values) else "")
                    unit.keys[f"numactl{option if option.startswith('--') else ''}"] = Fact(
                        "numactl", nodes, before[j].state, Site(unit.site.file, line), "wrapper", option
                    )
        elif value.rsplit("/", 1)[-1] == "taskset":
            unit.keys["taskset"] = Fact(
                "taskset", " ".join(values[i + 1 : i + 3]), State.LITERAL,
                Site(unit.site.file, before[i].line), "wrapper", "taskset",
            )  # fmt: skip
