"""Kubernetes manifests and Helm values: containers, config maps, services."""

from __future__ import annotations

import re
from typing import Any

from lvllm.audit import names
from lvllm.audit.facts import Fact, FileFacts, Launch, Resources, Site, State, Unit, Word
from lvllm.audit.readers import dockerrun, launch, options, yamldoc
from lvllm.audit.values import cpus, gib, number, scalar

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_REFERENCE = re.compile(r"\$\(([A-Za-z_]\w*)\)")
_PODS = ("containers", "initContainers")


def is_manifest(doc: yamldoc.Doc) -> bool:
    return isinstance(doc.value, dict) and isinstance(doc.value.get("kind"), str)


def is_helm_values(doc: yamldoc.Doc) -> bool:
    return isinstance(doc.value, dict) and (
        "servingEngineSpec" in doc.value
        or "vllmConfig" in str(list(doc.value))[:2000]
        or _helm_image(doc.value)
    )


def _helm_image(value: dict[str, Any]) -> bool:
    image = value.get("image")
    repository = image.get("repository") if isinstance(image, dict) else image
    return isinstance(repository, str) and dockerrun.is_vllm_image(repository)


def read(doc: yamldoc.Doc, file: str) -> FileFacts:
    """One manifest document."""
    facts = FileFacts()
    value = doc.value
    kind = value.get("kind")
    if kind == "ConfigMap":
        data = value.get("data")
        for name, text in (data if isinstance(data, dict) else {}).items():
            if isinstance(text, str):
                line = doc.line("data", name)
                start = line + (
                    1 if "\n" in text and doc.source[line - doc.first_line].rstrip()[-1:] in "|>-+" else 0
                )
                facts.embedded[name] = (start, text)
    elif kind == "Service":
        spec = value.get("spec")
        if isinstance(spec, dict) and spec.get("type") in ("LoadBalancer", "NodePort"):
            site = Site(file, doc.line("spec", "type"))
            facts.services.append(
                Fact(
                    "service",
                    spec.get("selector") or {},
                    State.LITERAL,
                    site,
                    "kubernetes",
                    str(spec["type"]),
                )
            )
    elif kind == "Ingress":
        facts.hints["reverse_proxy"] = Site(file, doc.line("kind"))
    elif kind in ("ServiceMonitor", "PodMonitor"):
        facts.hints["metrics"] = Site(file, doc.line("kind"))
    elif kind == "List":
        items = value.get("items")
        for i, item in enumerate(items if isinstance(items, list) else []):
            if isinstance(item, dict):
                _pods(doc, item, ("items", i), file, facts)
        return facts
    _pods(doc, value, (), file, facts)
    return facts


def _pods(doc: yamldoc.Doc, value: Any, path: yamldoc.Path, file: str, facts: FileFacts) -> None:
    """Every pod specification below `value`."""
    if isinstance(value, dict):
        containers = value.get("containers")
        if isinstance(containers, list):
            for i, container in enumerate(containers):
                if isinstance(container, dict):
                    one = _Container(doc, (*path, "containers", i), container, value, file)
                    unit = one.unit()
                    if unit is not None:
                        facts.units.append(unit)
        for key, item in value.items():
            if key not in _PODS:
                _pods(doc, item, (*path, key), file, facts)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _pods(doc, item, (*path, i), file, facts)


class _Container:
    def __init__(
        self, doc: yamldoc.Doc, path: yamldoc.Path, value: dict[str, Any], pod: dict[str, Any], file: str
    ) -> None:
        self.doc, self.path, self.value, self.pod, self.file = doc, path, value, pod, file
        self.env = self._environment()

    def site(self, *more: str | int) -> Site:
        return Site(self.file, self.doc.line(*self.path, *more))

    def _environment(self) -> dict[str, Fact]:
        env: dict[str, Fact] = {}
        listed = self.value.get("env")
        for i, item in enumerate(listed if isinstance(listed, list) else []):
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                continue
            name = item["name"]
            if "value" in item:
                text = item["value"]
                text = "" if text is None else str(text)
                env[name] = Fact(name, text, State.LITERAL, self.site("env", i, "value"), "kubernetes", name)
            else:
                env[name] = Fact(name, None, State.DYNAMIC, self.site("env", i), "kubernetes", name)
        return env

    def words(self, key: str) -> list[Word]:
        listed = self.value.get(key)
        if isinstance(listed, str):
            listed = [listed]
        words = []
        for i, item in enumerate(listed if isinstance(listed, list) else []):
            text = str(item).lower() if isinstance(item, bool) else str(item)
            words.append(self._expand(text, self.doc.line(*self.path, key, i)))
        return words

    def _expand(self, text: str, line: int) -> Word:
        """``$(NAME)`` of the container's own environment."""
        state = State.LITERAL

        def value(match: re.Match[str]) -> str:
            nonlocal state
            fact = self.env.get(match.group(1))
            if fact is None or not fact.known:
                state = State.DYNAMIC
                return match.group(0)
            return str(fact.value)

        return Word(_REFERENCE.sub(value, text), text, line, state)

    def unit(self) -> Unit | None:
        image = self.value.get("image")
        command, arguments = self.words("command"), self.words("args")
        words = [*command, *arguments]
        context = launch.Context(self.file, "kubernetes")
        unit = self._from_shell(words, context)
        if unit is None and words:
            unit = launch.recognise(words, context)
        if unit is None and isinstance(image, str) and dockerrun.is_vllm_image(image) and not command:
            unit = image_unit(arguments, self.file, self.site("args" if arguments else "image"), "kubernetes")
        if unit is None:
            return None
        unit.name = str(self.value.get("name") or "")
        unit.env = {**self.env, **unit.env}
        if isinstance(image, str):
            unit.image = Fact("image", image, State.LITERAL, self.site("image"), "kubernetes", image)
        unit.resources = self._resources()
        return unit

    def _from_shell(self, words: list[Word], context: launch.Context) -> Unit | None:
        for i, word in enumerate(words[:-1]):
            shell_before = i > 0 and words[i - 1].value.endswith("sh")
            if shell_before and word.value.startswith("-") and word.value.endswith("c"):
                text = words[i + 1]
                key = ("command", i + 1) if i + 1 < len(self.words("command")) else (
                    "args", i + 1 - len(self.words("command")))  # fmt: skip
                found = launch.from_script(text.value, context, text.line).units
                for unit in found:
                    if unit.launch is not None:
                        _relocate(unit, self.doc, (*self.path, *key))
                    return unit
        return None

    def _resources(self) -> Resources:
        result = Resources(container=True)
        resources = self.value.get("resources")
        resources = resources if isinstance(resources, dict) else {}
        for kind in ("requests", "limits"):
            entries = resources.get(kind)
            for key, value in (entries if isinstance(entries, dict) else {}).items():
                fact = self._quantity(key, value, kind)
                if fact is None:
                    continue
                if fact.name == "cpus" and result.cpus is None:
                    result.cpus = fact
                elif fact.name == "memory_gib":
                    result.memory_gib = fact
                elif fact.name == "gpus":
                    result.gpus = fact
        selector = self.pod.get("nodeSelector")
        product = selector.get("nvidia.com/gpu.product") if isinstance(selector, dict) else None
        if isinstance(product, str):
            result.gpu_name = Fact("gpu_name", product, State.LITERAL, self.site(), "kubernetes", product)
        security = self.value.get("securityContext")
        if isinstance(security, dict):
            result.privileged = security.get("privileged") is True
            added = security.get("capabilities")
            added = added.get("add") if isinstance(added, dict) else None
            result.cap_add = tuple(map(str, added)) if isinstance(added, list) else ()
        if self.pod.get("hostNetwork") is True:
            result.published = Fact(
                "published", "host network", State.LITERAL, self.site(), "kubernetes", "hostNetwork"
            )
        return result

    def _quantity(self, key: str, value: Any, kind: str) -> Fact | None:
        site = self.site("resources", kind, key)
        if key == "cpu" and cpus(value) is not None:
            return Fact("cpus", cpus(value), State.LITERAL, site, "kubernetes", f"{kind}.cpu")
        if key == "memory" and gib(value) is not None:
            return Fact("memory_gib", gib(value), State.LITERAL, site, "kubernetes", f"{kind}.memory")
        if key == "nvidia.com/gpu" and number(value) is not None:
            return Fact("gpus", int(number(value) or 0), State.LITERAL, site, "kubernetes", key)
        return None


def _relocate(unit: Unit, doc: yamldoc.Doc, path: yamldoc.Path) -> None:
    """Facts of a script inside a block scalar: the lines on which they are written."""
    assert unit.launch is not None
    if path not in doc.ends:
        return
    old = unit.launch.words
    new = doc.relocate(old, *path)
    unit.launch.words = new
    by_setting = {k: new[v[-1][0]].line for k, v in unit.launch.spans.items() if v and v[-1][0] < len(new)}
    for name, fact in list(unit.settings.items()):
        line = by_setting.get(name, fact.site.line)
        unit.settings[name] = Fact(
            fact.name, fact.value, fact.state, Site(fact.site.file, line), fact.origin, fact.written,
            fact.documentation,
        )  # fmt: skip


def image_unit(arguments: list[Word], file: str, site: Site, origin: str) -> Unit:
    """A container whose image's own entry point is the API server."""
    parsed = options.parse(arguments, file, origin)
    unit = Unit("vllm image", site, serves=True, settings=parsed.settings, strict_names=True)
    unit.unknown = parsed.unknown
    unit.launch = Launch(arguments, 0, parsed.spans)
    if parsed.positional and parsed.positional[0][0] == 0:
        word = parsed.positional[0][1]
        value = None if word.state is State.DYNAMIC else word.value
        unit.settings["model"] = Fact("model", value, word.state, Site(file, word.line), origin, "model")
    options.take_config(unit)
    return unit


def read_helm(doc: yamldoc.Doc, file: str) -> FileFacts:
    """Helm values of charts that serve vLLM."""
    facts = FileFacts()
    spec = doc.value.get("servingEngineSpec")
    if isinstance(spec, dict):
        models = spec.get("modelSpec")
        for i, model in enumerate(models if isinstance(models, list) else []):
            if isinstance(model, dict) and model.get("enabled") is not False:
                path: yamldoc.Path = ("servingEngineSpec", "modelSpec", i)
                facts.units.append(_helm_model(doc, path, model, file))
    elif _helm_image(doc.value) or isinstance(doc.value.get("vllmConfig"), dict):
        facts.units.append(_helm_model(doc, (), doc.value, file))
    return facts


def _helm_model(doc: yamldoc.Doc, path: yamldoc.Path, model: dict[str, Any], file: str) -> Unit:
    def fact(name: str, value: Any, *more: str | int) -> Fact:
        written = str(more[-1]) if more else name
        return Fact(name, value, State.LITERAL, Site(file, doc.line(*path, *more)), "helm values", written)

    unit = Unit("helm values", Site(file, doc.line(*path)), serves=True, name=str(model.get("name") or ""))
    for key in ("modelURL", "model"):
        if isinstance(model.get(key), str):
            unit.settings["model"] = fact("model", model[key], key)
    config = model.get("vllmConfig")
    for key, value in (config if isinstance(config, dict) else {}).items():
        name = _CAMEL.sub("_", key).lower()
        if name == "extra_args" and isinstance(value, list):
            words = [Word(str(v), str(v), doc.line(*path, "vllmConfig", key, i)) for i, v in enumerate(value)]
            parsed = options.parse(words, file, "helm values")
            unit.settings.update(parsed.settings)
            unit.unknown += parsed.unknown
        elif names.is_setting(name):
            plain = scalar(value) if isinstance(value, str) and name != "dtype" else value
            unit.settings[name] = fact(name, plain, "vllmConfig", key)
    listed = model.get("env")
    for i, item in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(item, dict) and isinstance(item.get("name"), str) and "value" in item:
            unit.env[item["name"]] = fact(item["name"], str(item["value"]), "env", i, "value")
    resources = Resources(container=True)
    for key, name, read_value in (
        ("requestCPU", "cpus", cpus), ("requestMemory", "memory_gib", gib), ("requestGPU", "gpus", number),
    ):  # fmt: skip
        quantity = read_value(model.get(key))
        # With Ray the requests are those of one node out of several.
        if quantity and "raySpec" not in model:
            setattr(resources, name, fact(name, max(1, int(quantity)) if name == "gpus" else quantity, key))
    unit.resources = resources
    tag, repository = model.get("tag"), model.get("repository")
    image = model.get("image")
    if isinstance(image, dict):
        tag, repository = image.get("tag", tag), image.get("repository", repository)
    if isinstance(repository, str):
        unit.image = fact(
            "image", f"{repository}:{tag}" if tag else repository, "tag" if tag else "repository"
        )
    return unit
