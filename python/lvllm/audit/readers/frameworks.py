"""Training and serving frameworks: their keys → engine settings (table in frameworks.toml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lvllm.audit import names
from lvllm.audit.facts import Fact, Launch, Site, State, Unit, Value, Word
from lvllm.audit.readers import options
from lvllm.audit.values import boolean, scalar


def spec(framework: str) -> dict[str, Any]:
    """The entry of a framework in frameworks.toml."""
    found: dict[str, Any] = names.table("frameworks")[framework]
    return found


def uses_vllm(framework: str, launcher: str, keys: Mapping[str, Fact]) -> bool:
    """Whether a configuration of `framework` starts vLLM at all."""

    def value(name: str) -> Value:
        fact = keys.get(name)
        return fact.value if fact is not None else None

    if framework == "trl":
        return boolean(value("use_vllm")) is True or ("use_vllm" in keys and not keys["use_vllm"].known)
    if framework == "verl":
        return bool(value("actor_rollout_ref.rollout.name") == "vllm")
    if framework == "openrlhf":
        engines = value("vllm.num_engines") or value("vllm_num_engines")
        return bool(engines) or any(k.startswith(("vllm.", "vllm_")) for k in keys)
    if framework == "swift":
        if launcher == "swift rollout":
            return True
        infer = str(value("infer_backend") or "").lower()
        return infer == "vllm" or boolean(value("use_vllm")) is True
    if framework == "llamafactory":
        return str(value("infer_backend") or "").lower() == "vllm"
    return True


def make_unit(
    framework: str, launcher: str, site: Site, keys: Mapping[str, Fact], *, documentation: bool = False
) -> Unit | None:
    """A unit out of a framework's keys, or None if it does not start vLLM."""
    if not uses_vllm(framework, launcher, keys):
        return None
    unit = Unit(launcher, site, framework=framework, documentation=documentation)
    for name, fact in keys.items():
        setting = _setting_name(framework, name)
        if setting is None:
            unit.keys[_key_name(framework, name)] = fact
        else:
            unit.settings[setting] = Fact(
                setting, fact.value, fact.state, fact.site, fact.origin, fact.written, documentation
            )
        nested = _nested(framework, name, fact)
        unit.settings.update({f.name: f for f in nested})
    _renamed(framework, keys, unit)
    serving = ("swift deploy", "swift rollout", "llamafactory api")
    unit.serves = launcher in serving
    return unit


def add_defaults(unit: Unit) -> None:
    """The framework's documented defaults for what nothing sets."""
    if unit.framework is None or unit.framework not in names.table("frameworks"):
        return
    entry = spec(unit.framework)
    if unit.launcher == "trl vllm-serve":
        return
    for name, value in entry.get("defaults", {}).items():
        origin = f"{unit.framework} default"
        unit.settings.setdefault(name, Fact(name, value, State.FRAMEWORK, unit.site, origin, name))
    for name, value in entry.get("key_defaults", {}).items():
        origin = f"{unit.framework} default"
        unit.keys.setdefault(name, Fact(name, value, State.FRAMEWORK, unit.site, origin, name))


def _setting_name(framework: str, key: str) -> str | None:
    """The engine setting that a framework key stands for."""
    entry = spec(framework)
    table: dict[str, str] = entry["keys"]
    prefix = entry.get("prefix", "")
    if framework == "verl":
        if key == "actor_rollout_ref.model.path":
            return "model"
        for deep in (f"{prefix}engine_kwargs.vllm.", "engine_kwargs.vllm."):
            if key.startswith(deep):
                return key.removeprefix(deep).replace("-", "_")
        return table.get(key.removeprefix(prefix)) if key.startswith(prefix) else None
    if framework == "openrlhf":
        current = entry["renamed"].get(key, key)
        return table.get(current) or table.get(key)
    if key in table:
        return table[key]
    if prefix and key.startswith(prefix):
        rest = key.removeprefix(prefix)
        if rest in names.fields() and rest not in ("host", "port"):
            return rest
    return None


def _key_name(framework: str, key: str) -> str:
    if framework == "verl":
        return key.removeprefix(spec(framework)["prefix"])
    if framework == "openrlhf":
        return str(spec(framework)["renamed"].get(key) or key)
    return key


def _nested(framework: str, name: str, fact: Fact) -> list[Fact]:
    """``vllm_config: {…}``, ``vllm_engine_kwargs: {…}``: a map of engine settings."""
    last = name.rpartition(".")[2]
    if last not in ("vllm_config", "vllm_engine_kwargs", "engine_kwargs"):
        return []
    value = scalar(fact.value) if isinstance(fact.value, str) else fact.value
    if isinstance(value, dict) and isinstance(value.get("vllm"), dict):
        value = value["vllm"]
    if not isinstance(value, dict):
        return []
    return [
        Fact(names.field_name(k), v, fact.state, fact.site, fact.origin, k, fact.documentation)
        for k, v in value.items()
    ]


def _renamed(framework: str, keys: Mapping[str, Fact], unit: Unit) -> None:
    """Old spellings, for advisory X4: value = the name to use now ('' = dropped)."""
    for name, fact in keys.items():
        new = spec(framework).get("renamed", {}).get(name)
        if new is not None:
            unit.keys[f"renamed:{name}"] = Fact(
                name, new, State.LITERAL, fact.site, fact.origin, fact.written, fact.documentation
            )


def from_words(
    words: Sequence[Word], at: int, launcher: str, file: str, *, origin: str, documentation: bool
) -> Unit | None:
    """A unit out of a framework's command line."""
    framework = launcher.partition(" ")[0]
    site = Site(file, words[at - 1].line)
    if framework == "verl":
        keys = hydra(words[at:], file, origin, documentation)
        launch = Launch(list(words), at)
    else:
        parsed = options.parse(words, file, origin, start=at, strict=False, documentation=documentation)
        keys = dict(parsed.settings)
        for _, word in parsed.positional:
            key, equals, value = word.value.partition("=")
            if equals:
                keys[key] = Fact(
                    key, scalar(value), word.state, Site(file, word.line), origin, key, documentation
                )
        launch = Launch(list(words), at, parsed.spans)
        config = _config_file(parsed, keys)
        if config is not None:
            unit = make_unit(framework, launcher, site, keys, documentation=documentation)
            if unit is None:
                unit = Unit(launcher, site, framework=framework, documentation=documentation)
                unit.keys = {"pending": config, **keys}
                unit.serves = launcher == "llamafactory api"
            unit.config_refs.append(config)
            unit.launch = launch
            return unit
    unit = make_unit(framework, launcher, site, keys, documentation=documentation)
    if unit is not None:
        unit.launch = launch
    return unit


def _config_file(parsed: options.Parsed, keys: Mapping[str, Fact]) -> Fact | None:
    """The configuration file named on the command line."""
    for name in ("config", "config_file"):
        if name in keys and isinstance(keys[name].value, str):
            return keys[name]
    for _, word in parsed.positional:
        if word.value.endswith((".yaml", ".yml", ".json")):
            site = Site(next(iter(keys.values())).site.file, word.line) if keys else Site("", word.line)
            return Fact("config", word.value, word.state, site, "command line", "config")
    return None


def hydra(words: Sequence[Word], file: str, origin: str, documentation: bool) -> dict[str, Fact]:
    """Hydra overrides: ``a.b=c``, ``+a.b=c``, ``++a.b=c``."""
    keys: dict[str, Fact] = {}
    for word in words:
        key, equals, text = word.value.partition("=")
        name = key.lstrip("+~")
        if not equals or not name or " " in name:
            continue
        state = word.state
        value: Value = None if state is State.DYNAMIC else scalar(text.strip("'\""))
        keys[name] = Fact(name, value, state, Site(file, word.line), origin, name, documentation)
    return keys


def flatten_mapping(
    value: Mapping[str, Value], line_of: Any, file: str, origin: str, prefix: tuple[str, ...] = ()
) -> dict[str, Fact]:
    """A nested configuration as dotted keys; maps named like engine keyword maps stay whole."""
    flat: dict[str, Fact] = {}
    for key, item in value.items():
        path = (*prefix, key)
        name = ".".join(path)
        whole = key in ("vllm_config", "vllm_engine_kwargs") or not isinstance(item, dict)
        if whole:
            flat[name] = Fact(name, item, State.LITERAL, Site(file, line_of(*path)), origin, key)
        else:
            flat.update(flatten_mapping(item, line_of, file, origin, path))
    return flat
