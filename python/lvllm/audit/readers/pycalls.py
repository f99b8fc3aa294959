"""Python calls that start an engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lvllm.audit import names
from lvllm.audit.facts import Fact, State, Unit
from lvllm.audit.readers import frameworks
from lvllm.audit.readers.options import json_setting
from lvllm.audit.readers.pyeval import UNKNOWN, Result

if TYPE_CHECKING:
    from lvllm.audit.readers.python import _Module

_ENGINE_CLASSES = ("EngineArgs", "AsyncEngineArgs")
_INTEGRATIONS = (
    "VLLM",
    "VLLMOpenAI",
    "Vllm",
    "VllmServer",
    "VLLMwithChatTemplate",
    "vLLMEngineProcessorConfig",
)
_KWARGS = ("engine_kwargs", "vllm_kwargs", "model_kwargs")
# Keyword of an integration → engine field.
_RENAMED = {
    "model_source": "model",
    "model_name": "model",
    "path": "model",
    "model_id": "model",
    "max_seq_len": "",
}


def unit(module: _Module, node: ast.Call, name: str) -> Unit | None:
    """The unit that a call makes, or None."""
    tail = name.rpartition(".")[2]
    root = name.partition(".")[0]
    if root == "vllm" and tail == "LLM":
        return _engine(module, node, "LLM")
    if root == "vllm" and tail in _ENGINE_CLASSES:
        return _engine(module, node, "engine")
    if root == "trl" and tail.endswith("Config"):
        return _framework(module, node, "trl", "trl")
    if tail == "from_pretrained" and "FastLanguageModel" in name and root == "unsloth":
        fast = next((k for k in node.keywords if k.arg == "fast_inference"), None)
        if fast is None or module.evaluator.value(fast.value).value is not True:
            return None
        return _framework(module, node, "unsloth", "unsloth")
    if tail in _INTEGRATIONS and root in (
        "langchain",
        "langchain_community",
        "llama_index",
        "ray",
        "opencompass",
    ):
        if tail == "VLLMOpenAI" or tail == "VllmServer":
            return None
        return _integration(module, node, root)
    if name == "dict" and any(k.arg == "type" for k in node.keywords):
        kind = next(k.value for k in node.keywords if k.arg == "type")
        if module.scope.dotted(kind).rpartition(".")[2] in ("VLLM", "VLLMwithChatTemplate"):
            return _integration(module, node, "opencompass")
    return None


def _pairs(module: _Module, node: ast.Call) -> Iterator[tuple[str, ast.AST, Result]]:
    """Every keyword, ``**d`` looked through one assignment deep, later updates of ``d`` included."""
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value, module.evaluator.value(keyword.value)
        else:
            yield from _spread(module, keyword.value)


def _spread(module: _Module, node: ast.expr) -> Iterator[tuple[str, ast.AST, Result]]:
    name = ""
    if isinstance(node, ast.Name):
        name = node.id
        values = module.scope.assigned.get(name, [])
        if len(values) != 1:
            return
        node = values[0]
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value, module.evaluator.value(value)
    elif isinstance(node, ast.Call) and module.scope.dotted(node.func) == "dict":
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value, module.evaluator.value(keyword.value)
    if name:
        branches = [n for n in module.nodes if isinstance(n, ast.If | ast.Try | ast.IfExp)]
        conditional = {inner for branch in branches for inner in ast.walk(branch)}
        for item in module.nodes:
            if isinstance(item, ast.Assign) and len(item.targets) == 1:
                target = item.targets[0]
                if (
                    isinstance(target, ast.Subscript)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == name
                ):
                    key_result = module.evaluator.value(target.slice)
                    if isinstance(key_result.value, str):
                        found = module.evaluator.value(item.value)
                        # Under a condition the key may be absent: set, but not for sure.
                        state = State.DYNAMIC if item in conditional else State.DEFAULT_OF
                        state = state if found.state is State.LITERAL else found.state
                        yield key_result.value, item, Result(found.value, state, found.default_of)


def _facts(module: _Module, node: ast.Call) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for name, place, found in _pairs(module, node):
        value = json_setting(name, found.value)
        facts[name] = Fact(name, value, found.state, module.site(place), "python", name, module.documentation)
        if name in _KWARGS and isinstance(value, dict):
            for key, item in value.items():
                state = State.DYNAMIC if item == UNKNOWN else found.state
                inner = None if state is State.DYNAMIC else item
                facts.setdefault(
                    key, Fact(key, inner, state, module.site(place), "python", key, module.documentation)
                )
    return facts


def _engine(module: _Module, node: ast.Call, launcher: str) -> Unit:
    made = Unit(launcher, module.site(node), strict_names=True)
    for name, fact in _facts(module, node).items():
        if name in _KWARGS:
            continue
        made.settings[name] = fact
        if name not in names.keywords():
            made.unknown.append(fact)
    if node.args:
        found = module.evaluator.value(node.args[0])
        made.settings.setdefault(
            "model",
            Fact("model", found.value, found.state, module.site(node.args[0]), "python", "model",
                 module.documentation),
        )  # fmt: skip
    return made


def _framework(module: _Module, node: ast.Call, framework: str, launcher: str) -> Unit | None:
    made = frameworks.make_unit(
        framework, launcher, module.site(node), _facts(module, node), documentation=module.documentation
    )
    if made is not None and framework == "trl" and "model" not in made.settings:
        _trainer_model(module, made)
    return made


def _trainer_model(module: _Module, made: Unit) -> None:
    """``GRPOTrainer(model="…")`` in the same module names the model."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and module.scope.dotted(node.func).endswith("Trainer"):
            for keyword in node.keywords:
                found = module.evaluator.value(keyword.value)
                if keyword.arg == "model" and isinstance(found.value, str):
                    site = module.site(keyword.value)
                    made.settings["model"] = Fact("model", found.value, found.state, site, "python", "model")
                    return


def _integration(module: _Module, node: ast.Call, root: str) -> Unit:
    made = Unit(root, module.site(node), framework=root)
    for name, fact in _facts(module, node).items():
        field = _RENAMED.get(name, name)
        if name in _KWARGS or not field:
            continue
        if field in names.fields() or field in names.removed("options"):
            made.settings[field] = Fact(
                field, fact.value, fact.state, fact.site, fact.origin, name, fact.documentation
            )
        else:
            made.keys[name] = fact
    return made
