"""``docker run … vllm/vllm-openai[:tag] ARGS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lvllm.audit.facts import Fact, Launch, Resources, Site, State, Unit, Word
from lvllm.audit.readers import options
from lvllm.audit.values import cpus, gib

_FLAGS = frozenset(
    (
        "-d",
        "-i",
        "-t",
        "-it",
        "-ti",
        "-dit",
        "-itd",
        "-id",
        "-td",
        "--rm",
        "--detach",
        "--interactive",
        "--tty",
        "--privileged",
        "--init",
        "-P",
        "--publish-all",
        "--read-only",
        "--no-healthcheck",
        "--oom-kill-disable",
    )
)


def is_vllm_image(image: str) -> bool:
    """True for images whose entry point is a vLLM API server."""
    name = image.rpartition("@")[0] or image
    name = name.rsplit("/", 1)[-1].partition(":")[0]
    return "vllm" in name and not any(w in name for w in ("router", "operator", "webui", "dashboard", "docs"))


def from_words(
    words: Sequence[Word],
    file: str,
    documentation: bool,
    recognise: Callable[[Sequence[Word]], Unit | None],
) -> Unit | None:
    """The unit of a ``docker run`` command, or None."""
    values = [w.value for w in words]
    run = next((i for i, v in enumerate(values) if v in ("run", "create")), None)
    if run is None:
        return None
    env: dict[str, Fact] = {}
    resources = Resources(container=True)
    entrypoint: Word | None = None
    env_refs: list[str] = []
    i = run + 1
    while i < len(words) and values[i].startswith("-"):
        option, equals, value = values[i].partition("=")
        if option in _FLAGS:
            resources.privileged |= option == "--privileged"
            i += 1
            continue
        word = words[i] if equals else (words[i + 1] if i + 1 < len(words) else words[i])
        value = value if equals else word.value
        site = Site(file, words[i].line)
        if option in ("-e", "--env"):
            name, _, text = value.partition("=")
            if "=" in value:
                env[name] = Fact(name, text, word.state, site, "docker run", name, documentation)
        elif option == "--entrypoint":
            entrypoint = Word(value, word.raw, word.line, word.state)
        elif option == "--env-file":
            env_refs.append(value)
        else:
            _resource(resources, option, value, site)
        i += 1 if equals else 2
    if i >= len(words):
        return None
    image, rest = words[i], list(words[i + 1 :])
    unit = _engine(words, i, image, entrypoint, rest, file, documentation, recognise)
    if unit is None:
        return None
    unit.env = {**env, **unit.env}
    unit.env_refs += env_refs
    unit.resources = resources
    unit.documentation = documentation
    named = None if image.state is State.DYNAMIC else image.value
    unit.image = Fact(
        "image", named, image.state, Site(file, image.line), "docker run", image.raw, documentation
    )
    return unit


def _engine(
    words: Sequence[Word],
    at: int,
    image: Word,
    entrypoint: Word | None,
    rest: list[Word],
    file: str,
    documentation: bool,
    recognise: Callable[[Sequence[Word]], Unit | None],
) -> Unit | None:
    inner = recognise([entrypoint, *rest] if entrypoint is not None else rest) if rest else None
    if inner is not None:
        if inner.launch is not None:
            inner.launch.words = list(words[: at + 1]) + inner.launch.words
            shift = at + 1
            inner.launch.start += shift
            inner.launch.spans = {
                k: [(a + shift, b + shift) for a, b in v] for k, v in inner.launch.spans.items()
            }
        return inner
    if not is_vllm_image(image.value) or entrypoint is not None:
        return None
    parsed = options.parse(words, file, "docker run", start=at + 1, documentation=documentation)
    unit = Unit("vllm image", Site(file, image.line), serves=True, settings=parsed.settings)
    unit.unknown = parsed.unknown
    unit.strict_names = True
    unit.launch = Launch(list(words), at + 1, parsed.spans)
    if parsed.positional and parsed.positional[0][0] == at + 1:
        word = parsed.positional[0][1]
        value = None if word.state is State.DYNAMIC else word.value
        unit.settings["model"] = Fact(
            "model", value, word.state, Site(file, word.line), "docker run", "model", documentation
        )
    options.take_config(unit)
    return unit


def _resource(resources: Resources, option: str, value: str, site: Site) -> None:
    def fact(name: str, content: object) -> Fact:
        return Fact(name, content, State.LITERAL, site, "docker run", option)

    if option == "--cpus" and cpus(value) is not None:
        resources.cpus = fact("cpus", cpus(value))
    elif option in ("-m", "--memory") and gib(value) is not None:
        resources.memory_gib = fact("memory_gib", gib(value))
    elif option == "--cpuset-cpus":
        resources.cpuset = fact("cpuset", value)
    elif option == "--cap-add":
        resources.cap_add = (*resources.cap_add, value)
    elif option == "--gpus":
        text = value.strip("'\"")
        if text.startswith("device="):
            resources.gpus = fact("gpus", len([d for d in text[7:].split(",") if d]))
        elif text.isdigit():
            resources.gpus = fact("gpus", int(text))
    elif option == "--ulimit" and value.startswith("memlock"):
        resources.memlock = fact("memlock", value.partition("=")[2])
    elif option in ("-p", "--publish") and not value.startswith(("127.", "localhost")):
        resources.published = fact("published", value)
