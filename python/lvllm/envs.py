"""The only reader of LVLLM_* and LK_* variables: strict parsing, merge with additional_config, printing."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lvllm.flags import (
    FALSE_WORDS,
    FLAGS,
    INHERITED_CPUS,
    KERNEL_FAMILIES,
    NO_EFFECT,
    TRUE_WORDS,
    UNBUILT_VALUES,
    Flag,
)
from lvllm.ranges import LayerSpec

SWITCH = FLAGS[0]
CONFIG_SECTION = "lvllm"
_PREFIXES = ("LVLLM_", "LK_")
_BY_NAME: dict[str, Flag] = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases)}
_BY_KEY: dict[str, Flag] = {flag.key: flag for flag in FLAGS}


class SettingError(ValueError):
    """A setting is unknown, malformed or out of range; the text names it, its value and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """The effective configuration of one process. Field names are the keys of the flags table."""

    moe_numa_enabled: bool
    threads: int | None
    thread_binding: str
    numa_nodes: tuple[int, ...] | None
    gpu_resident_moe_layers: LayerSpec
    gpu_resident_moe_layers_spec: LayerSpec
    gpu_prefill_min_batch_size: int | None
    gpu_prefetch_window: int
    enable_numa_interleave: bool
    power_saving: bool
    step_timeout_s: float
    host_gib: float | None
    kernel: str | None
    isa: str | None
    compute: str
    origin: dict[str, str] = field(default_factory=dict, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    def is_set(self, flag: Flag) -> bool:
        """Whether the user gave a value, wherever."""
        return self.origin[flag.key] != "default"

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of (variable, effective value, where it came from) in the order of the flags table."""
        return [(f.name, f.kind.show(getattr(self, f.key)), self.origin[f.key]) for f in FLAGS]

    def graph_key(self) -> dict[str, str]:
        """What changes the graph that torch.compile sees; goes into vLLM's compile-cache hash."""
        return {
            "resident": str(self.gpu_resident_moe_layers),
            "resident_draft": str(self.gpu_resident_moe_layers_spec),
        }


def _parse(flag: Flag, name: str, raw: object) -> Any:
    text = ("1" if raw else "0") if isinstance(raw, bool) else str(raw).strip()
    try:
        return flag.kind.parse(text)
    except ValueError as error:
        own = str(error)
        detail = f" ({own})" if own and not own.startswith(("invalid literal", "could not convert")) else ""
        raise SettingError(f"{name}={raw!r} is not allowed{detail}; allowed: {flag.kind.allowed}") from None


def _unknown(name: str, known: list[str], where: str = "") -> SettingError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return SettingError(f"{where}{name} is not a setting of lvllm{hint} `lvllm doctor` lists all settings.")


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    notices: list[str] = []
    for name in sorted(environ):
        if not name.startswith(_PREFIXES) or name == INHERITED_CPUS:
            continue
        if name in NO_EFFECT:
            notices.append(f"{name} is accepted and has no effect: {NO_EFFECT[name]}")
            continue
        flag = _BY_NAME.get(name)
        if flag is None:
            raise _unknown(name, [*_BY_NAME, *NO_EFFECT])
        if not environ[name].strip():
            continue  # `VAR= command` is the shell's way to unset a variable for one command
        value = _parse(flag, name, environ[name])
        if flag.key in values and values[flag.key] != value:
            raise SettingError(
                f"{name}={environ[name]!r} contradicts {origin[flag.key]}: both set {flag.name}; keep one of "
                "them"
            )
        values[flag.key] = value
        if name == flag.name or flag.key not in origin:
            origin[flag.key] = name
        if name != flag.name:
            notices.append(f"{name} is an alias of {flag.name}")
    return values, origin, notices


def _from_config(section: object) -> dict[str, Any]:
    if not isinstance(section, Mapping):
        raise SettingError(
            f'additional_config["{CONFIG_SECTION}"] is {section!r}; it must be an object of settings such as '
            '{"threads": 16}'
        )
    values: dict[str, Any] = {}
    for raw_key, raw in section.items():
        key = str(raw_key)
        flag = _BY_KEY.get(key.lower()) or _BY_NAME.get(key.upper())
        if flag is None:
            raise _unknown(key, list(_BY_KEY), where=f"additional_config {CONFIG_SECTION}.")
        if flag is SWITCH:
            raise SettingError(
                f"{SWITCH.name} cannot be given in additional_config, since it decides whether lvllm is "
                "loaded at all; set it in the environment"
            )
        if raw is not None:
            values[flag.key] = _parse(flag, f"additional_config {CONFIG_SECTION}.{key}", raw)
    return values


def load(section: object = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read every setting. section: the "lvllm" object of additional_config, if any; the environment wins.

    Raises SettingError for an unknown name, an illegal value, or an alias that contradicts its name.
    """
    values, names, notices = _from_environment(os.environ if environ is None else environ)
    configured = {} if section is None else _from_config(section)
    fields: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for flag in FLAGS:
        if flag.key in values:
            fields[flag.key] = values[flag.key]
            origin[flag.key] = "environment" if names[flag.key] == flag.name else names[flag.key]
            if flag.key in configured and configured[flag.key] != values[flag.key]:
                notices.append(f"{flag.name} of the environment overrides the one in additional_config")
        elif flag.key in configured:
            fields[flag.key] = configured[flag.key]
            origin[flag.key] = "additional_config"
        else:
            fields[flag.key] = flag.default
            origin[flag.key] = "default"
    return Settings(**fields, origin=origin, notices=tuple(notices))


def unbuilt_values(settings: Settings) -> list[str]:
    """Sentences about values that this build cannot serve."""
    return [
        f"{name}={value}: {reason}"
        for (name, value), reason in UNBUILT_VALUES.items()
        if getattr(settings, _BY_NAME[name].key) == value
    ]


def engine_options(settings: Settings) -> dict[str, Any]:
    """The settings that are keyword arguments of the native Engine."""
    return {
        "threads": settings.threads,
        "nodes": settings.numa_nodes,
        "binding": settings.thread_binding,
        "isa": settings.isa,
        "kernel": KERNEL_FAMILIES.get(settings.kernel, settings.kernel) if settings.kernel else None,
        "compute": settings.compute,
        "power_saving": settings.power_saving,
        "step_timeout_s": settings.step_timeout_s,
    }


def switch_is_on(environ: Mapping[str, str] | None = None) -> bool:
    """The master switch alone, so that a process with the switch off does nothing else."""
    environ = os.environ if environ is None else environ
    for name in (SWITCH.name, *SWITCH.aliases):
        text = environ.get(name, "").strip().lower()
        if text in TRUE_WORDS:
            return True
        if text and text not in FALSE_WORDS:
            raise SettingError(f"{name}={environ[name]!r} is not allowed; allowed: {SWITCH.kind.allowed}")
    return False


def misspelt_switch(environ: Mapping[str, str] | None = None) -> str | None:
    """With the switch unset: the name of a variable that was probably meant to be it."""
    environ = os.environ if environ is None else environ
    if any(name in environ for name in (SWITCH.name, *SWITCH.aliases)):
        return None
    unknown = [n for n in environ if n.startswith(_PREFIXES) and n not in _BY_NAME and n not in NO_EFFECT]
    near = difflib.get_close_matches(SWITCH.name, unknown, n=1, cutoff=0.8)
    return near[0] if near else None


def notices(settings: Settings, *, on_gpu: bool) -> list[str]:
    """One line for every setting that was given and can have no effect here."""
    lines = list(settings.notices)
    for flag in FLAGS:
        if not settings.is_set(flag):
            continue
        if flag.needs_gpu and not on_gpu:
            lines.append(
                f"{flag.name} has no effect: vLLM runs on the CPU platform, there is no GPU to move work to"
            )
        elif flag.unbuilt:
            lines.append(f"{flag.name} has no effect: {flag.unbuilt}")
    for spec, name in (
        (settings.gpu_resident_moe_layers, "LVLLM_GPU_RESIDENT_MOE_LAYERS"),
        (settings.gpu_resident_moe_layers_spec, "LVLLM_GPU_RESIDENT_MOE_LAYERS_SPEC"),
    ):
        if spec.auto:
            lines.append(
                f"{name}=auto has no effect: sizing by free VRAM is not part of this build; name the layers"
            )
        elif spec and not on_gpu:
            lines.append(
                f"{name}={spec}: on the CPU platform these layers stay with stock vLLM's own CPU experts"
            )
    return lines


def format_table(rows: list[tuple[str, str, str]]) -> str:
    """Aligned columns for the log and for `lvllm doctor`."""
    rows = [("setting", "value", "from"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
