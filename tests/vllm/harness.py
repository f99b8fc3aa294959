"""Engines of vLLM in subprocesses, and what their outputs are held against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ON = {"LVLLM_MOE_NUMA_ENABLED": "1"}
TIMEOUT_S = 540

CPU_MLA = {"attention_config": {"backend": "CPU_MLA"}}
"""DeepSeek in float32: where the CPU has AMX, vLLM prefers a backend that takes 16-bit weights only."""
MTP = CPU_MLA | {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}
}


@dataclass
class Outcome:
    """What a subprocess did. result: what run_engine.py wrote, None when it failed."""

    code: int
    text: str
    result: dict[str, Any] | None = None

    def generated(self, action: str = "generate", which: int = 0) -> dict[str, Any]:
        assert self.result is not None, self.text[-6000:]
        generated: dict[str, Any] = self.result[action][which]
        return generated


def environment(extra: dict[str, str]) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LVLLM_", "LK_", "VLLM_"))}
    env |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    return env | extra


def run_engine(
    folder: Path,
    model: Path,
    *,
    engine: dict[str, Any] | None = None,
    actions: tuple[str, ...] = ("generate",),
    **environ: str,
) -> Outcome:
    """One engine, eager and in-process unless told otherwise, in a subprocess of its own."""
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    options = {"enforce_eager": True} | (engine or {})
    job = {"model": str(model), "out": str(out), "engine": options, "actions": actions}
    command = [sys.executable, str(HERE / "run_engine.py"), json.dumps(job)]
    done = subprocess.run(
        command,
        env=environment(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    result = json.loads(out.read_text()) if out.is_file() else None
    return Outcome(done.returncode, done.stdout, result)


def assert_same(stock: dict[str, Any], hybrid: dict[str, Any], *, logprob: float = 1e-3) -> None:
    """Greedy tokens equal one by one, and all log-probabilities within `logprob`."""
    assert hybrid["tokens"] == stock["tokens"]
    for key in ("logprobs", "prompt_logprobs"):
        for mine, theirs in zip(hybrid[key], stock[key], strict=True):
            worst = max((abs(a - b) for a, b in zip(mine, theirs, strict=True)), default=0.0)
            assert worst < logprob, f"{key}: {worst}"


@dataclass
class StockCache:
    """Outputs of stock vLLM, each computed once a session."""

    folder: Path
    models: Callable[[str], Path]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __call__(self, kind: str, engine: dict[str, Any] | None = None, **environ: str) -> dict[str, Any]:
        key = json.dumps([kind, engine, environ], sort_keys=True)
        if key not in self.outcomes:
            self.outcomes[key] = run_engine(self.folder, self.models(kind), engine=engine, **environ)
        return self.outcomes[key].generated()
