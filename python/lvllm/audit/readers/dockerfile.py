"""Dockerfiles: base image, environment, the command of the last stage, installed packages."""

from __future__ import annotations

import io
import json
import logging

from dockerfile_parse import DockerfileParser

from lvllm.audit.facts import Fact, FileFacts, Launch, Resources, Site, State, Unit, Word
from lvllm.audit.readers import dockerrun, launch, options, shell

MAX_CHARACTERS = 2**18


def read(text: str, file: str) -> FileFacts:
    """Units and facts of one Dockerfile."""
    facts = FileFacts()
    if len(text) > MAX_CHARACTERS:
        facts.warnings.append(f"{file}: longer than a Dockerfile that the audit reads")
        return facts
    try:
        logging.disable(logging.CRITICAL)  # the parser logs what it cannot read; this report says it once
        stream = io.BytesIO(text.encode())
        structure = DockerfileParser(fileobj=stream, build_args={}, env_replace=False).structure
    except Exception as error:
        facts.warnings.append(f"{file}: not readable as a Dockerfile ({type(error).__name__})")
        return facts
    finally:
        logging.disable(logging.NOTSET)
    stage = _Stage(file)
    arguments: dict[str, Fact] = {}
    for item in structure:
        instruction, value = item["instruction"].upper(), item["value"]
        site = Site(file, int(item["startline"]) + 1)
        if instruction == "FROM":
            if stage.image is not None:
                stage.finish(facts)
            stage = _Stage(file)
            stage.variables.update({k: _variable(v) for k, v in arguments.items()})
            stage.base(value, site)
        elif instruction == "ARG":
            name, equals, default = value.partition("=")
            if equals:
                fact = Fact(name.strip(), default.strip("\"'"), State.DEFAULT_OF, site, "ARG", name)
                arguments[fact.name] = fact
                stage.variables[fact.name] = _variable(fact)
        elif instruction == "ENV":
            stage.environment(value, site)
        elif instruction in ("CMD", "ENTRYPOINT"):
            stage.command(instruction, value, site, item["content"])
        elif instruction == "RUN":
            found = launch.from_script(value, launch.Context(file, "RUN"), site.line)
            facts.dependencies += found.dependencies
    stage.finish(facts)
    return facts


def _variable(fact: Fact) -> shell.Variable:
    word = Word(str(fact.value), str(fact.value), fact.site.line, fact.state)
    return shell.Variable([word], fact.state, fact.site.line)


class _Stage:
    """One build stage; only what the last one leaves behind starts a server."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.image: Fact | None = None
        self.env: dict[str, Fact] = {}
        self.variables: dict[str, shell.Variable] = {}
        self.entrypoint: list[Word] = []
        self.cmd: list[Word] = []
        self.script: tuple[str, int] | None = None

    def base(self, value: str, site: Site) -> None:
        text = value.split(" as ")[0].split(" AS ")[0].split()
        words = [t for t in text if not t.startswith("--")]
        name = words[0] if words else ""
        expanded = self._expand(name, site.line)
        dynamic = expanded.state is State.DYNAMIC
        self.image = Fact("image", None if dynamic else expanded.value, expanded.state, site, "FROM", name)

    def _expand(self, text: str, line: int) -> Word:
        commands = shell.parse(f"x {text}", line, dict(self.variables)).commands
        words = commands[0].words[1:] if commands else []
        return words[0] if len(words) == 1 else Word(text, text, line)

    def environment(self, value: str, site: Site) -> None:
        """``ENV A=b C=d`` or the old form ``ENV A b``."""
        first = value.split(None, 1)
        if first and "=" not in first[0] and len(first) == 2:
            pairs = [(first[0], self._expand(f'"{first[1]}"' if " " in first[1] else first[1], site.line))]
        else:
            script = shell.parse(f"export {value}", site.line, dict(self.variables))
            exported = {k: v for k, v in script.variables.items() if v.exported}
            pairs = [(k, Word(v.text, v.text, site.line, v.state)) for k, v in exported.items()]
        for name, word in pairs:
            self.env[name] = Fact(name, word.value, word.state, site, "ENV", name)
            self.variables[name] = shell.Variable([word], word.state, site.line, True)

    def command(self, instruction: str, value: str, site: Site, content: str) -> None:
        words: list[Word]
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if isinstance(parsed, list):
            lines = _word_lines([str(p) for p in parsed], content, site.line)
            words = [Word(str(p), str(p), line) for p, line in zip(parsed, lines, strict=True)]
            if len(words) == 3 and words[1].value in ("-c", "-lc") and words[0].value.endswith("sh"):
                self.script = (words[2].value, words[2].line)
        else:
            self.script = (value, site.line)
            words = []
        if instruction == "ENTRYPOINT":
            self.entrypoint, self.cmd = words, []
        else:
            self.cmd = words

    def finish(self, facts: FileFacts) -> None:
        """Adds the unit of this stage, if its command starts an engine."""
        context = launch.Context(self.file, "Dockerfile")
        words = [*self.entrypoint, *self.cmd]
        unit: Unit | None = None
        if self.script is not None and not (words and self.script[0] not in [w.value for w in words]):
            script = shell.parse(self.script[0], self.script[1], self.variables)
            for command in script.commands:
                found = launch.from_command(command, context).units
                unit = found[0] if found else unit
        elif words:
            unit = launch.recognise(words, context)
            if unit is None:
                unit = self._script_unit(words)
        image = self.image.value if self.image is not None else None
        vllm_image = isinstance(image, str) and dockerrun.is_vllm_image(image)
        if unit is None and vllm_image and not self.entrypoint and self.cmd:
            unit = self._image_unit()
        if self.image is not None and vllm_image:
            facts.images.append(self.image)
        facts.env.update(self.env)
        if unit is None:
            return
        if unit.image is None and vllm_image:
            unit.image = self.image
        unit.env = {**self.env, **unit.env}
        unit.resources = Resources(container=True)
        facts.units.append(unit)

    def _image_unit(self) -> Unit:
        """The base image's entry point is the API server; CMD holds its options."""
        parsed = options.parse(self.cmd, self.file, "Dockerfile")
        line = self.cmd[0].line if self.cmd else 1
        unit = Unit("vllm image", Site(self.file, line), serves=True, settings=parsed.settings)
        unit.unknown = parsed.unknown
        unit.strict_names = True
        unit.launch = Launch(self.cmd, 0, parsed.spans)
        if parsed.positional and parsed.positional[0][0] == 0:
            word = parsed.positional[0][1]
            unit.settings["model"] = Fact(
                "model", word.value, word.state, Site(self.file, word.line), "Dockerfile", "model"
            )
        return unit

    def _script_unit(self, words: list[Word]) -> Unit | None:
        """A command that runs a script of the project: joined with it later."""
        script = next((w for w in words if w.value.endswith((".sh", ".bash", ".py"))), None)
        if script is None:
            return None
        unit = Unit("script", Site(self.file, script.line))
        unit.script_refs.append(script.value)
        return unit


def _word_lines(words: list[str], content: str, first: int) -> list[int]:
    """Lines of the words of an exec-form command that spans several lines."""
    lines, at = [], 0
    for word in words:
        found = content.find(json.dumps(word), at)
        at = found if found >= 0 else at
        lines.append(first + content.count("\n", 0, at))
    return lines
