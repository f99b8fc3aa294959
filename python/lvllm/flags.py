"""The table of settings: one row per LVLLM_* / LK_* variable, with type, default, allowed values and meaning.

README, docs/flags.md, `lvllm doctor` and the parser in envs.py all follow this table; a test compares the
documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lvllm.ranges import LayerSpec, format_numbers, parse_layers, parse_numbers

TRUE_WORDS = ("1", "true", "on", "yes")
FALSE_WORDS = ("0", "false", "off", "no")


@dataclass(frozen=True)
class Kind:
    """How a value is read: `parse` raises ValueError; its text and `allowed` tell the user what is legal."""

    allowed: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str


def _bool(text: str) -> bool:
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError


BOOL = Kind("0 or 1", _bool, lambda v: "1" if v else "0")


def whole_number(minimum: int, maximum: int | None = None, *, word: str | None = None) -> Kind:
    """An int in [minimum, maximum]; `word` (such as "auto") stands for None."""

    def parse(text: str) -> int | None:
        if word and text.lower() == word:
            return None
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError
        return value

    allowed = f"a whole number from {minimum}" + ("" if maximum is None else f" to {maximum}")
    return Kind(
        allowed + (f", or {word}" if word else ""), parse, lambda v: str(word) if v is None else str(v)
    )


def positive(unit: str) -> Kind:
    def parse(text: str) -> float:
        value = float(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    return Kind(f"a number of {unit} above 0", parse, lambda v: "measured" if v is None else f"{v:g}")


def choice(*words: str, word: str | None = None) -> Kind:
    """One of `words`, any case; `word` stands for None and is what an unset value is shown as."""

    def parse(text: str) -> str | None:
        value = text.lower()
        if value == word:
            return None
        if value not in words:
            raise ValueError
        return value

    return Kind(
        ", ".join((*words, *([word] if word else []))), parse, lambda v: str(word) if v is None else str(v)
    )


NODES = Kind(
    "a list of NUMA nodes such as 0-1,4", parse_numbers, lambda v: "all" if v is None else format_numbers(v)
)
LAYERS = Kind("layer numbers such as 0-1,9, all, auto, or main:0-2,mtp:0", parse_layers)
DRAFT_LAYERS = Kind("draft layer numbers from 0, all, or auto", lambda text: parse_layers(text, part="mtp"))


@dataclass(frozen=True)
class Flag:
    """One variable. `key` is its name in additional_config's "lvllm" object and the field of Settings."""

    name: str
    kind: Kind
    default: Any
    default_text: str
    help: str
    aliases: tuple[str, ...] = ()
    needs_gpu: bool = False
    unbuilt: str | None = None

    @property
    def key(self) -> str:
        return self.name.partition("_")[2].lower()


FLAGS: tuple[Flag, ...] = (
    Flag(
        "LVLLM_MOE_NUMA_ENABLED",
        BOOL,
        False,
        "0",
        "master switch: 0 leaves vLLM untouched, 1 computes the routed experts on the CPU",
        aliases=("LK_MOE_HYBRID_ENABLED",),
    ),
    Flag(
        "LK_THREADS",
        whole_number(1, word="auto"),
        None,
        "auto",
        "worker threads of this process; more than the allowed CPUs is clamped with a warning",
    ),
    Flag(
        "LK_THREAD_BINDING",
        choice("cpu_core", "numa_node"),
        "cpu_core",
        "CPU_CORE",
        "CPU_CORE pins one thread per core; NUMA_NODE binds threads to their node's CPUs",
    ),
    Flag(
        "LVLLM_NUMA_NODES",
        NODES,
        None,
        "all allowed",
        "NUMA nodes that this server may use, for several servers on one host",
    ),
    Flag(
        "LVLLM_GPU_RESIDENT_MOE_LAYERS",
        LAYERS,
        LayerSpec(),
        "none",
        "layers whose experts stay on stock vLLM's path (in VRAM on a GPU)",
        aliases=("LK_GPU_RESIDENT_MOE_LAYERS",),
    ),
    Flag(
        "LVLLM_GPU_RESIDENT_MOE_LAYERS_SPEC",
        DRAFT_LAYERS,
        LayerSpec(),
        "none",
        "the same for the draft (MTP) layers, numbered from 0",
        aliases=(
            "LVLLM_GPU_RESIDENT_MOE_LAYERS_MTP",
            "LVLLM_GPU_RESIDENT_MOE_LAYERS_DSPARK",
            "LK_GPU_RESIDENT_MOE_LAYERS_SPEC",
            "LK_GPU_RESIDENT_MOE_LAYERS_MTP",
            "LK_GPU_RESIDENT_MOE_LAYERS_DSPARK",
        ),
    ),
    Flag(
        "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE",
        whole_number(0, word="auto"),
        None,
        "auto",
        "tokens of a step from which a host layer's experts are streamed to and computed on the GPU; 0 = "
        "never",
        aliases=("LK_GPU_PREFILL_MIN_TOKENS",),
        needs_gpu=True,
        unbuilt="GPU prefill by streaming is not part of this build; the CPU computes every step",
    ),
    Flag(
        "LVLLM_GPU_PREFETCH_WINDOW",
        whole_number(1, 64),
        1,
        "1",
        "layers staged ahead on the GPU during prefill",
        aliases=("LK_GPU_PREFETCH_WINDOW",),
        needs_gpu=True,
        unbuilt="GPU prefill by streaming is not part of this build; the CPU computes every step",
    ),
    Flag(
        "LVLLM_ENABLE_NUMA_INTERLEAVE",
        BOOL,
        True,
        "1",
        "1 checks every node's free memory before loading and spreads pages without a home; 0 loads fastest",
        aliases=("LK_NUMA_INTERLEAVE",),
    ),
    Flag(
        "LK_POWER_SAVING",
        BOOL,
        False,
        "0",
        "1 parks the workers at once when there is no work",
    ),
    Flag(
        "LVLLM_STEP_TIMEOUT_S",
        positive("seconds"),
        120.0,
        "120",
        "seconds without progress after which a step fails the engine instead of hanging",
    ),
    Flag(
        "LVLLM_HOST_GIB",
        positive("GiB"),
        None,
        "measured",
        "host memory that the fit check may count on",
    ),
    Flag(
        "LVLLM_KERNEL",
        choice("f32_fma", "bf16_dot", "i8_dot", "amx", word="measured"),
        None,
        "measured",
        "pins the compute family",
    ),
    Flag(
        "LVLLM_ISA",
        choice("scalar", "avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx", word="best"),
        None,
        "best",
        "forces an instruction set; one that the CPU lacks is an error",
    ),
    Flag(
        "LVLLM_COMPUTE",
        choice("exact", "int8"),
        "exact",
        "exact",
        "exact keeps activations in the model's dtype; int8 quantises them per group and changes numerics",
    ),
)

NO_EFFECT: dict[str, str] = {
    "LVLLM_ENABLE_MOE_LAYERWISE_LOAD": "weights are always loaded layer by layer",
    "LVLLM_MOE_USE_WEIGHT": "weights keep the checkpoint's own format",
    "LVLLM_MOE_QUANT_ON_GPU": "nothing is quantised while loading",
    "LVLLM_GPU_RESIDENT_MOE_EXPERTS": "whole layers are resident; see LVLLM_GPU_RESIDENT_MOE_LAYERS",
}
"""Accepted since existing scripts carry them; each is answered with one line."""

KERNEL_FAMILIES: dict[str, str] = {"f32_fma": "f32fma", "bf16_dot": "bf16dot", "amx": "bf16amx"}
"""Values of LVLLM_KERNEL that this build has, and the engine's names for them."""

UNBUILT_VALUES: dict[tuple[str, str], str] = {
    ("LVLLM_KERNEL", "i8_dot"): "int8 kernels are not part of this build; use f32_fma, bf16_dot or amx",
    ("LVLLM_COMPUTE", "int8"): "int8 kernels are not part of this build; use exact",
}
"""Values that are spelt right and cannot be served yet: refused at start, never taken for another."""

INHERITED_CPUS = "LVLLM_INHERITED_CPUS"
"""Set by lvllm itself: CPUs that the parent process was allowed, before vLLM binds its workers."""


def markdown() -> str:
    """docs/flags.md, the table for readers; `python -m lvllm.flags` prints it."""
    lines = [
        "# Settings",
        "",
        "Set in the environment, or without their prefix and in lower case in vLLM's additional",
        'configuration: `--additional-config \'{"lvllm": {"threads": 16}}\'`. The environment wins. An',
        "unknown `LVLLM_*` or `LK_*` name and an illegal value are errors; the effective configuration is",
        "printed at start and by `lvllm doctor`.",
        "",
        "| variable | default | allowed | meaning |",
        "|---|---|---|---|",
    ]
    for flag in FLAGS:
        note = f" Not yet effective: {flag.unbuilt}." if flag.unbuilt else ""
        lines.append(f"| `{flag.name}` | `{flag.default_text}` | {flag.kind.allowed} | {flag.help}.{note} |")
    lines += ["", "Values that are refused for now:", ""]
    lines += [f"- `{name}={value}`: {reason}" for (name, value), reason in UNBUILT_VALUES.items()]
    lines += ["", "Aliases, accepted with a notice:", ""]
    lines += [f"- `{alias}` for `{flag.name}`" for flag in FLAGS for alias in flag.aliases]
    lines += ["", "Accepted without effect, each with a notice:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in NO_EFFECT.items()]
    lines += [
        "",
        "`OMP_NUM_THREADS` is not ours: the engine uses no OpenMP. For vLLM's own worker processes",
        "`GOMP_SPINCOUNT` and `KMP_BLOCKTIME` are lowered unless they are set, so that idle OpenMP threads",
        "leave the cores to the engine.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
