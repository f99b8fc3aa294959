"""Compose files: one unit per service that starts an engine."""

from __future__ import annotations

from typing import Any

from lvllm.audit.facts import Fact, FileFacts, Launch, Resources, Site, State, Unit, Value, Word
from lvllm.audit.readers import dockerrun, launch, options, shell, yamldoc
from lvllm.audit.values import cpus, gib, number


def read(doc: yamldoc.Doc, file: str, env_file: dict[str, Fact]) -> FileFacts:
    """Units of one compose document; `env_file` are the variables of ``.env`` beside it."""
    facts = FileFacts()
    services = doc.value.get("services") if isinstance(doc.value, dict) else None
    if not isinstance(services, dict):
        return facts
    variables = {
        k: shell.Variable([Word(str(f.value), str(f.value), f.site.line, f.state)], f.state, f.site.line)
        for k, f in env_file.items()
        if f.known
    }
    for name, service in services.items():
        if isinstance(service, dict):
            _Service(doc, file, name, service, variables, facts).read()
    if any("nginx" in str(s.get("image", "")) or "traefik" in str(s.get("image", "")) or
           "caddy" in str(s.get("image", "")) for s in services.values() if isinstance(s, dict)):  # fmt: skip
        for unit in facts.units:
            unit.hints.setdefault("reverse_proxy", unit.site)
    return facts


class _Service:
    def __init__(
        self,
        doc: yamldoc.Doc,
        file: str,
        name: str,
        service: dict[str, Any],
        variables: dict[str, shell.Variable],
        facts: FileFacts,
    ) -> None:
        self.doc, self.file, self.name, self.service = doc, file, name, service
        self.variables, self.facts = variables, facts

    def site(self, *path: str | int) -> Site:
        return Site(self.file, self.doc.line("services", self.name, *path))

    def word(self, text: str, line: int) -> Word:
        """A value with compose's own ``${VAR:-default}`` replaced."""
        if "$" not in text:
            return Word(text, text, line)
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$$", "\\$")
        commands = shell.parse(f'x "{escaped}"', line, dict(self.variables)).commands
        if not commands or len(commands[0].words) != 2:
            return Word(text, text, line, State.DYNAMIC)
        found = commands[0].words[1]
        return Word(found.value, text, line, found.state)

    def words(self, key: str) -> list[Word]:
        """``command`` / ``entrypoint`` as words, whichever form it has."""
        value = self.service.get(key)
        if isinstance(value, list):
            return [
                self.word(_plain(item), self.doc.line("services", self.name, key, i))
                for i, item in enumerate(value)
            ]
        if isinstance(value, str):
            line = self.doc.line("services", self.name, key)
            # The value may start on the line after its key (folded and literal blocks).
            commands = shell.parse(" ".join(value.split("\n")), line, dict(self.variables)).commands
            words = [w for c in commands for w in c.words]
            return self.doc.relocate(words, "services", self.name, key)
        return []

    def read(self) -> None:
        image_text = self.service.get("image")
        image: Fact | None = None
        if isinstance(image_text, str):
            word = self.word(image_text, self.doc.line("services", self.name, "image"))
            dynamic = word.state is State.DYNAMIC
            image = Fact(
                "image",
                None if dynamic else word.value,
                word.state,
                self.site("image"),
                "compose",
                image_text,
            )
        unit = self._unit(image_text if image is None or image.value is None else str(image.value))
        if unit is None:
            return
        unit.name = self.name
        unit.env = {**self._environment(), **unit.env}
        unit.image = image
        unit.resources = self._resources()
        built = self._dockerfile()
        if built is not None:
            unit.env_refs.append(built)
        refs = self.service.get("env_file")
        for ref in refs if isinstance(refs, list) else [refs]:
            if isinstance(ref, str):
                unit.env_refs.append(ref)
            elif isinstance(ref, dict) and isinstance(ref.get("path"), str):
                unit.env_refs.append(ref["path"])
        self.facts.units.append(unit)

    def _dockerfile(self) -> str | None:
        """The Dockerfile that the service is built from: its ENV is the outermost environment."""
        build = self.service.get("build")
        if isinstance(build, str):
            return f"{build.rstrip('/')}/Dockerfile"
        if isinstance(build, dict):
            context = str(build.get("context") or ".").rstrip("/")
            return f"{context}/{build.get('dockerfile') or 'Dockerfile'}"
        return None

    def _unit(self, image: Any) -> Unit | None:
        entrypoint, command = self.words("entrypoint"), self.words("command")
        context = launch.Context(self.file, "compose")
        words = [*entrypoint, *command]
        for i, word in enumerate(words):
            if word.value in ("-c", "-lc") and i + 1 < len(words) and words[i - 1].value.endswith("sh"):
                found = launch.from_script(words[i + 1].value, context, words[i + 1].line).units
                if found:
                    return found[0]
        unit = launch.recognise(words, context) if words else None
        if unit is not None:
            return unit
        if isinstance(image, str) and dockerrun.is_vllm_image(image) and not entrypoint:
            return self._image_unit(command)
        script = next((w for w in words if w.value.endswith((".sh", ".bash", ".py"))), None)
        built = self._dockerfile()
        if script is None and not words and built is not None:
            # The image's own command: joined with the Dockerfile's unit.
            unit = Unit("script", self.site("build"))
            unit.script_refs.append(built)
            return unit
        if script is None:
            return None
        unit = Unit("script", Site(self.file, script.line))
        unit.script_refs.append(script.value)
        return unit

    def _image_unit(self, command: list[Word]) -> Unit:
        parsed = options.parse(command, self.file, "compose")
        key = "command" if "command" in self.service else "image"
        unit = Unit("vllm image", self.site(key), serves=True, settings=parsed.settings)
        unit.unknown = parsed.unknown
        unit.strict_names = True
        unit.launch = Launch(command, 0, parsed.spans)
        if parsed.positional and parsed.positional[0][0] == 0:
            word = parsed.positional[0][1]
            value = None if word.state is State.DYNAMIC else word.value
            unit.settings["model"] = Fact(
                "model", value, word.state, Site(self.file, word.line), "compose", "model"
            )
        options.take_config(unit)
        return unit

    def _environment(self) -> dict[str, Fact]:
        value = self.service.get("environment")
        pairs: list[tuple[str, str | None, Site]] = []
        if isinstance(value, dict):
            for key, item in value.items():
                pairs.append((key, None if item is None else _plain(item), self.site("environment", key)))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                name, equals, text = str(item).partition("=")
                pairs.append((name, text if equals else None, self.site("environment", i)))
        env = {}
        for name, given, site in pairs:
            if given is None:
                env[name] = Fact(name, None, State.DYNAMIC, site, "compose", name)
                continue
            word = self.word(given, site.line)
            env[name] = Fact(name, word.value, word.state, site, "compose", name)
        return env

    def _resources(self) -> Resources:
        service = self.service
        result = Resources(container=True, privileged=service.get("privileged") is True)
        capabilities = service.get("cap_add")
        if isinstance(capabilities, list):
            result.cap_add = tuple(str(c) for c in capabilities)
        limits = _dig(service, "deploy", "resources", "limits")
        cores = service.get("cpus", _dig(limits, "cpus"))
        if number(cores) is not None:
            result.cpus = self.fact("cpus", cpus(cores), "cpus" if "cpus" in service else "deploy")
        memory = service.get("mem_limit", _dig(limits, "memory"))
        if gib(memory) is not None:
            result.memory_gib = self.fact("memory_gib", gib(memory), "mem_limit")
        if service.get("cpuset") is not None:
            result.cpuset = self.fact("cpuset", str(service["cpuset"]), "cpuset")
        devices = _dig(service, "deploy", "resources", "reservations", "devices")
        for device in devices if isinstance(devices, list) else []:
            if not isinstance(device, dict):
                continue
            ids, count = device.get("device_ids"), device.get("count")
            total = len(ids) if isinstance(ids, list) else count
            if isinstance(total, int) and not isinstance(total, bool):
                result.gpus = self.fact("gpus", total, "deploy")
            if isinstance(ids, list):
                result.gpus = Fact(
                    "gpus", len(ids), State.LITERAL, self.site("deploy"), "compose", ",".join(map(str, ids))
                )
        memlock = _dig(service, "ulimits", "memlock")
        if memlock is not None:
            value = memlock.get("hard", memlock.get("soft")) if isinstance(memlock, dict) else memlock
            result.memlock = self.fact("memlock", value, "ulimits")
        ports = service.get("ports")
        for i, port in enumerate(ports if isinstance(ports, list) else []):
            if not str(port).startswith(("127.", "localhost", "[::1]")) and not (
                isinstance(port, dict) and str(port.get("host_ip", "")).startswith("127.")
            ):
                result.published = Fact(
                    "published", str(port), State.LITERAL, self.site("ports", i), "compose", "ports"
                )
                break
        if service.get("network_mode") == "host" and result.published is None:
            result.published = self.fact("published", "host network", "network_mode")
        return result

    def fact(self, name: str, value: Value, key: str) -> Fact:
        return Fact(name, value, State.LITERAL, self.site(key), "compose", key)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _dig(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
