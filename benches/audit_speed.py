"""Speed of `lvllm audit` on a made project of many files.

    python benches/audit_speed.py [--files 2000] [--rounds 3]

The project mixes what real ones hold: mostly Python, some of it about vLLM, scripts, YAML, JSON and text.
Run it on one core with `taskset -c 0`. Targets: 2,000 files under 5 s, 20,000 files under 20 s.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from lvllm.audit import main

PLAIN = "\n".join(f"def f{i}(a, b={i}):\n    return [a, b, {{'k': a + b}}]\n" for i in range(60))
ENGINE = (
    "from vllm import LLM, SamplingParams\n\n"
    + PLAIN
    + "\nllm = LLM('Qwen/Qwen3-8B', max_model_len=8192)\nllm.generate(['x'], SamplingParams(max_tokens=16))\n"
)
SERVE = (
    "#!/bin/bash\nexport VLLM_LOGGING_LEVEL=INFO\n"
    "vllm serve Qwen/Qwen3-8B \\\n  --max-model-len 8192 \\\n  -tp 2\n"
)
POD = (
    "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec:\n  containers:\n    - name: v\n"
    "      image: vllm/vllm-openai:v0.33.0\n      args: [--model, Qwen/Qwen3-8B, --max-model-len, '8192']\n"
)
KINDS = [
    *[("py", PLAIN)] * 28,
    *[("py", "import vllm\n" + PLAIN)] * 6,
    ("py", ENGINE),
    *[("sh", SERVE)] * 2,
    ("yaml", POD),
    *[("yaml", "a: 1\nb: [1, 2, 3]\n")] * 4,
    *[("json", '{"a": [1, 2, 3]}')] * 4,
    *[("md", "# Notes\n" * 40)] * 4,
]
"""Fifty files: one in twelve starts an engine, six more Python modules name vLLM."""


def make(folder: Path, files: int) -> None:
    """`files` files, 100 to a folder."""
    for i in range(files):
        suffix, text = KINDS[i % len(KINDS)]
        path = folder / f"p{i // 100:04}" / f"f{i:06}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


def run(folder: Path) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of one audit."""
    wall, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        main([str(folder), "--format", "json", "--fail-on", "never"])
    return time.perf_counter() - wall, time.process_time() - cpu


def bench() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, options.files)
        for _ in range(options.rounds):
            wall, cpu = run(folder)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{options.files} files: {wall:.2f} s wall, {cpu:.2f} s CPU, {memory:.0f} MiB")


if __name__ == "__main__":
    bench()
