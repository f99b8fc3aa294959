"""YAML, TOML and JSON files: vLLM option files and framework configurations."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

from lvllm.audit import names
from lvllm.audit.facts import Fact, FileFacts, Site, State, Unit
from lvllm.audit.readers import compose, frameworks, kubernetes, yamldoc
from lvllm.audit.readers.options import json_setting
from lvllm.audit.textpos import key_line
from lvllm.audit.values import human_int, is_plain

LineOf = Callable[..., int]
MAX_DEPTH = 40


def read_yaml(text: str, file: str, base: str, env_file: dict[str, Fact]) -> FileFacts:
    """Any YAML file: compose, Kubernetes, Helm values, framework or vLLM configuration."""
    facts = FileFacts()
    try:
        docs = yamldoc.load_all(text)
    except yamldoc.YamlError as error:
        if "{{" in text:
            facts.warnings.append(f"{file}: a template, not read ({error})")
        else:
            facts.warnings.append(f"{file}: {error}")
        return facts
    is_compose = base.startswith(("docker-compose", "compose"))
    for doc in docs:
        value = doc.value
        if not isinstance(value, dict):
            continue
        if is_compose or (isinstance(value.get("services"), dict) and "kind" not in value):
            facts.extend(compose.read(doc, file, env_file))
        elif kubernetes.is_manifest(doc):
            facts.extend(kubernetes.read(doc, file))
        elif kubernetes.is_helm_values(doc):
            facts.extend(kubernetes.read_helm(doc, file))
        else:
            facts.extend(mapping(value, doc.line, file, "yaml"))
            facts.config = option_file(value, doc.line, file)
    return facts


def read_toml(text: str, file: str) -> FileFacts:
    """A TOML configuration."""
    facts = FileFacts()
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        facts.warnings.append(f"{file}: not valid TOML ({type(error).__name__})")
        return facts
    return mapping(value, lambda *path: key_line(text, map(str, path)), file, "toml")


def read_json(text: str, file: str) -> FileFacts:
    """A JSON configuration."""
    facts = FileFacts()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        facts.warnings.append(f"{file}: not valid JSON ({type(error).__name__})")
        return facts
    if not isinstance(value, dict):
        return facts
    return mapping(value, lambda *path: key_line(text, map(str, path)), file, "json")


def option_file(value: dict[str, Any], line_of: LineOf, file: str, offset: int = 0) -> dict[str, Fact]:
    """The keys of a file given to ``vllm serve --config``; nested maps stay values."""
    result = {}
    for key, item in value.items():
        name = names.field_name(key)
        if isinstance(item, str):
            number = human_int(item)
            item = number if number is not None else json_setting(name, item)
        result[name] = Fact(name, item, State.LITERAL, Site(file, line_of(key) + offset), "config file", key)
    return result


def mapping(value: dict[str, Any], line_of: LineOf, file: str, origin: str) -> FileFacts:
    """Units of a configuration mapping, whatever framework it belongs to."""
    facts = FileFacts()
    keys = frameworks.flatten_mapping(value, line_of, file, origin)
    facts.flat = keys
    found = _framework(keys)
    if found is not None:
        framework, launcher = found
        first = next(iter(keys.values())).site
        unit = frameworks.make_unit(framework, launcher, Site(file, _anchor(keys, first)), keys)
        if unit is not None:
            facts.units.append(unit)
        return facts
    for path, block in _vllm_blocks(value, (), 0):
        unit = Unit("config", Site(file, line_of(*path)))
        for key, item in block.items():
            name = names.field_name(key)
            if names.is_setting(name) and is_plain(item):
                parsed = json_setting(name, item) if isinstance(item, str) else item
                unit.settings[name] = Fact(
                    name, parsed, State.LITERAL, Site(file, line_of(*path, key)), origin, key
                )
        unit.site = Site(file, min(f.site.line for f in unit.settings.values()))
        serving = names.table("options")["detect"]["serving"]
        unit.serves = any(names.field_name(k) in serving for k in block)
        facts.units.append(unit)
    return facts


def _anchor(keys: dict[str, Fact], first: Site) -> int:
    for name in ("use_vllm", "infer_backend", "actor_rollout_ref.rollout.name"):
        if name in keys:
            return keys[name].site.line
    return first.line


def _framework(keys: dict[str, Fact]) -> tuple[str, str] | None:
    """(framework, launcher) of a flat configuration."""
    infer = keys.get("infer_backend")
    if infer is not None:
        swift_only = any(
            k in keys for k in ("rlhf_type", "vllm_mode", "model_type", "sleep_level", "swift_version")
        )
        return ("swift", "swift") if swift_only else ("llamafactory", "llamafactory")
    if "use_vllm" in keys:
        if "rlhf_type" in keys or "sleep_level" in keys:
            return "swift", "swift rlhf"
        return "trl", "trl"
    if "actor_rollout_ref.rollout.name" in keys:
        return "verl", "verl"
    return None


def _vllm_blocks(
    value: Any, path: tuple[str | int, ...], depth: int
) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Mappings that hold two distinctive vLLM keys."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, dict):
        fields = [names.field_name(k) for k in value]
        if len(names.distinctive().intersection(fields)) >= 2:
            yield path, value
            return
        for key, item in value.items():
            yield from _vllm_blocks(item, (*path, key), depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value[:200]):
            yield from _vllm_blocks(item, (*path, i), depth + 1)
