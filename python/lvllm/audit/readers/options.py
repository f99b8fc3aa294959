"""Words after ``vllm serve`` (and its kin) → settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from lvllm.audit import names
from lvllm.audit.facts import Fact, Site, State, Unit, Value, Word
from lvllm.audit.values import human_int, scalar

_JSON_FIELDS = ("_config", "_params", "_kwargs", "_overrides", "_per_prompt", "_prompt", "_args")


@dataclass(slots=True)
class Parsed:
    """The result of reading one option list."""

    settings: dict[str, Fact] = field(default_factory=dict)
    unknown: list[Fact] = field(default_factory=list)
    positional: list[tuple[int, Word]] = field(default_factory=list)
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def parse(
    words: Sequence[Word],
    file: str,
    origin: str,
    *,
    start: int = 0,
    strict: bool = True,
    documentation: bool = False,
) -> Parsed:
    """Read ``--a-b V``, ``--a_b=V``, ``--no-a-b``, short forms, dotted options and JSON values.

    `strict` says that the program is vLLM itself: names that it does not have go
    to `unknown`. Spans are indices into `words`.
    """
    reader = _Reader(words, file, origin, strict, documentation)
    i = start
    while i < len(words):
        i = reader.step(i)
    return reader.out


class _Reader:
    def __init__(
        self, words: Sequence[Word], file: str, origin: str, strict: bool, documentation: bool
    ) -> None:
        self.words = words
        self.file = file
        self.origin = origin
        self.strict = strict
        self.documentation = documentation
        self.out = Parsed()

    def step(self, i: int) -> int:
        """Reads the option or positional at `i`; returns the index after it."""
        word = self.words[i]
        text = word.value
        if not text.startswith("-") or text == "-" or _is_number(text):
            self.out.positional.append((i, word))
            return i + 1
        name, attached, negated = self._name(text)
        if name is None:
            return i + 1
        head, dot, rest = name.partition(".")
        path = tuple(rest.rstrip("+").split(".")) if dot else ()
        if path and not self.strict:
            # Other programs use dots in plain option names.
            head, path = name, ()
        values, end = self._values(i, head, bool(path), attached, negated)
        self._store(head, path, values, word, text.partition("=")[0], (i, end))
        return end

    def _name(self, text: str) -> tuple[str | None, Word | None, bool]:
        """(field name with dotted path, attached value, negated)."""
        written, equals, tail = text.partition("=")
        attached = Word(tail, tail, 0) if equals else None
        if not text.startswith("--"):
            short: dict[str, str] = names.table("options")["short"]
            if text.startswith("-O") and text != "-O" and written not in short:
                level = text[2:].removeprefix("=")
                return "optimization_level", Word(level, level, 0), False
            stem, dot, rest = written.partition(".")
            if stem in short:
                return short[stem] + dot + rest, attached, False
            if not self.strict and len(written) > 2:
                return written.lstrip("-").replace("-", "_"), attached, False
            return None, None, False
        stem, dot, rest = written.removeprefix("--").partition(".")
        name = names.unabbreviated(names.field_name(stem)) if self.strict else names.field_name(stem)
        if name.startswith("no_") and names.is_setting(names.field_name(name[3:])):
            return names.field_name(name[3:]), attached, True
        return (name + dot + rest) if name else None, attached, False

    def _values(
        self, i: int, head: str, dotted: bool, attached: Word | None, negated: bool
    ) -> tuple[list[Word] | bool, int]:
        """The value words (or a boolean for a flag) and the index after the option."""
        if attached is not None:
            word = self.words[i]
            return [Word(attached.value, attached.raw, word.line, word.state)], i + 1
        if negated:
            return False, i + 1
        following = self.words[i + 1] if i + 1 < len(self.words) else None
        if head in names.flags() and not dotted:
            given = following.value.lower() if following is not None else ""
            if following is not None and (
                given in ("true", "false") or (not self.strict and given in ("0", "1"))
            ):
                return [following], i + 2
            return True, i + 1
        if following is None or _is_option(following):
            return True, i + 1
        if head in names.list_options() and not dotted:
            end = i + 1
            while end < len(self.words) and not _is_option(self.words[end]):
                end += 1
            return list(self.words[i + 1 : end]), end
        return [following], i + 2

    def _store(
        self,
        head: str,
        path: tuple[str, ...],
        values: list[Word] | bool,
        option: Word,
        written: str,
        span: tuple[int, int],
    ) -> None:
        state = State.LITERAL
        value: Value
        if isinstance(values, bool):
            value = values
        else:
            state = _worst([option.state if len(values) == 1 and "=" in option.value else State.LITERAL,
                            *(w.state for w in values)])  # fmt: skip
            value = convert(head, [w.value for w in values], dotted=bool(path))
            if state is State.DYNAMIC:
                value = None
        for key in reversed(path):
            value = {key: value}
        old = self.out.settings.get(head)
        if path and old is not None and isinstance(old.value, dict) and isinstance(value, dict):
            value = merge(old.value, value)
        fact = Fact(
            head, value, state, Site(self.file, option.line), self.origin, written, self.documentation
        )
        if path and state is State.DYNAMIC:
            # One unknown key does not make the others unknown.
            fact = Fact(head, value, State.LITERAL, fact.site, self.origin, written, self.documentation)
        self.out.spans.setdefault(head, []).append(span)
        known = head in names.options() or head in names.fields()
        if self.strict and not known:
            self.out.unknown.append(fact)
        self.out.settings[head] = fact


def take_config(unit: Unit) -> None:
    """``--config FILE`` becomes a reference; ``--config=FILE`` is kept apart: stock vLLM does not read it."""
    fact = unit.settings.pop("config", None)
    if fact is None or unit.launch is None:
        return
    spans = unit.launch.spans.get("config", [])
    if spans and "=" in unit.launch.words[spans[-1][0]].value.partition(" ")[0]:
        unit.keys["config="] = fact
    else:
        unit.config_refs.append(fact)


def convert(name: str, values: Sequence[str], *, dotted: bool = False) -> Value:
    """Option words as the value that vLLM would see."""
    if name in names.list_options() and not dotted:
        return [scalar(v) for v in values]
    text = values[0] if values else ""
    if dotted:
        return scalar(text)
    if name == "max_model_len" and text.lower() == "auto":
        return -1
    if name == "optimization_level" and text[:1] in "{[":
        return scalar(text)
    if name in ("model", "served_model_name", "api_key", "host", "dtype", "kv_cache_dtype", "quantization"):
        return text
    human = human_int(text)
    if human is not None:
        return human
    return scalar(text)


def merge(old: dict[str, Value], new: dict[str, Value]) -> dict[str, Value]:
    """`old` updated by `new`, nested mappings merged."""
    result = dict(old)
    for key, value in new.items():
        base = result.get(key)
        both = isinstance(base, dict) and isinstance(value, dict)
        result[key] = merge(base, value) if both else value  # type: ignore[arg-type]
    return result


def json_setting(name: str, value: Value) -> Value:
    """A mapping-valued setting that was given as JSON text, parsed."""
    if isinstance(value, str) and name.endswith(_JSON_FIELDS) and value.lstrip()[:1] == "{":
        try:
            return json.loads(value)
        except ValueError:
            return scalar(value)
    return value


def _worst(states: Sequence[State]) -> State:
    for state in (State.DYNAMIC, State.DEFAULT_OF):
        if state in states:
            return state
    return State.LITERAL


def _is_option(word: Word) -> bool:
    return word.value.startswith("-") and not _is_number(word.value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
