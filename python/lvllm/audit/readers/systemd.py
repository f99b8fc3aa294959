"""systemd service files."""

from __future__ import annotations

from collections.abc import Iterator

from lvllm.audit.facts import Fact, FileFacts, Site, State, Unit
from lvllm.audit.readers import launch, shell
from lvllm.audit.values import cpus, gib


def entries(text: str) -> Iterator[tuple[str, str, str, int]]:
    """(section, key, value, line) of every assignment; continued lines keep their line ends."""
    section = ""
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        first = i
        line = lines[i].strip()
        i += 1
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            continue
        if not line or line[0] in "#;" or "=" not in line:
            continue
        while line.endswith("\\") and i < len(lines):
            following = lines[i].strip()
            i += 1
            if following[:1] not in ("#", ";"):
                line += f"\n{following}"
        key, _, value = line.partition("=")
        yield section, key.strip(), value.strip(), first + 1


def read(text: str, file: str) -> FileFacts:
    """The unit that ``ExecStart`` starts, with the service's environment and limits."""
    facts = FileFacts()
    env: dict[str, Fact] = {}
    env_refs: list[str] = []
    settings: dict[str, tuple[str, int]] = {}
    units: list[Unit] = []
    for section, key, value, line in entries(text):
        if section != "Service":
            continue
        if key == "Environment":
            for command in shell.parse(f": {value}", line).commands[:1]:
                for word in command.words[1:]:
                    name, equals, text = word.value.partition("=")
                    if equals:
                        env[name] = Fact(name, text, word.state, Site(file, word.line), "systemd", name)
        elif key == "EnvironmentFile":
            env_refs.append(value.lstrip("-"))
        elif key in ("ExecStart", "ExecStartPre"):
            units += _started(value.lstrip("@-:+!"), file, line) if key == "ExecStart" else []
        else:
            settings[key] = (value, line)
    facts.env = env
    for unit in units:
        unit.env = {**env, **unit.env}
        unit.env_refs += env_refs
        _limits(unit, settings, file)
        facts.units.append(unit)
    return facts


def _started(value: str, file: str, line: int) -> list[Unit]:
    context = launch.Context(file, "systemd")
    script = shell.parse(value, line)
    for command in script.commands:
        found = launch.from_command(command, context).units
        if found:
            return found
        for word in command.words:
            if word.value.endswith((".sh", ".bash", ".py")):
                unit = Unit("script", Site(file, word.line))
                unit.script_refs.append(word.value)
                launch.wrappers(unit, command.words)
                return [unit]
    return []


def _limits(unit: Unit, settings: dict[str, tuple[str, int]], file: str) -> None:
    def fact(name: str, value: object, key: str) -> Fact:
        return Fact(name, value, State.LITERAL, Site(file, settings[key][1]), "systemd", key)

    resources = unit.resources
    for key, (value, _) in settings.items():
        if key == "CPUAffinity":
            resources.cpuset = fact("cpuset", value.replace(" ", ","), key)
        elif key in ("NUMAPolicy", "NUMAMask"):
            policy = settings.get("NUMAPolicy", ("", 0))[0]
            mask = settings.get("NUMAMask", ("", 0))[0]
            if policy in ("bind", "preferred") and "NUMAPolicy" in settings:
                resources.numa_policy = fact("numa_policy", mask or policy, "NUMAPolicy")
        elif key == "LimitMEMLOCK":
            resources.memlock = fact("memlock", value, key)
        elif key in ("MemoryMax", "MemoryHigh") and gib(value) is not None:
            resources.memory_gib = fact("memory_gib", gib(value), key)
        elif key == "CPUQuota" and value.endswith("%") and cpus(value[:-1]) is not None:
            resources.cpus = fact("cpus", (cpus(value[:-1]) or 0.0) / 100, key)
