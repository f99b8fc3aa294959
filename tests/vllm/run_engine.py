"""Run one vLLM engine in this process and write what it generated as JSON: the body of a test's subprocess.

    python run_engine.py '{"model": DIR, "out": FILE, "engine": {...}, "actions": [...]}'

actions: "generate" (greedy over PROMPTS), "reload" (reload_weights, then generate again), "load_real" (the
same after a start with dummy weights), "modules" (which modules of vLLM and of ours are loaded), "placement"
(the accounting of the worker). Each one's result lands under its name; a repeated action becomes a list.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PROMPTS = [
    "the quick brown fox",
    "experts live in host memory while",
    "def main():\n    print(",
    "0123456789",
    "the lazy dog jumps over the accelerator and",
    "x",
    "attention stays on the accelerator. experts live in host memory while attention stays",
    "hello",
]
TOKENS = 24


def generate(llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [
            [
                step[token].logprob
                for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)
            ]
            for o in outputs
        ],
        "prompt_logprobs": [
            [
                step[token].logprob
                for step, token in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)
            ]
            for o in outputs
        ],
    }


def placement(worker: Any) -> list[dict[str, Any]]:
    from lvllm.vllm.placement import ledger_of

    return [row.as_dict() for row in ledger_of(worker.get_model()).rows()]


def main() -> None:
    job = json.loads(sys.argv[1])
    started = time.perf_counter()
    from vllm import LLM

    engine = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "seed": 0,
        "disable_log_stats": True,
    }
    llm = LLM(model=job["model"], **(engine | job.get("engine", {})))
    result: dict[str, Any] = {"start_s": time.perf_counter() - started}
    for action in job.get("actions", ["generate"]):
        begin = time.perf_counter()
        if action == "generate":
            value: Any = generate(llm)
        elif action == "reload":
            llm.collective_rpc("reload_weights")
            value = generate(llm)
        elif action == "load_real":
            llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
            llm.collective_rpc("reload_weights")
            value = generate(llm)
        elif action == "placement":
            value = llm.collective_rpc(placement)
        elif action == "modules":
            import vllm.model_executor.layers.fused_moe.routed_experts as routed

            value = {
                "lvllm": sorted(m for m in sys.modules if m.split(".")[0] == "lvllm"),
                "hook_file": routed.RoutedExperts._get_quant_method.__code__.co_filename,
                "config_file": type(llm.llm_engine.vllm_config).__module__,
            }
        else:
            raise SystemExit(f"unknown action {action!r}")
        result.setdefault(action, []).append(value)
        result.setdefault("seconds", {})[action] = time.perf_counter() - begin
    with open(job["out"], "w") as file:
        json.dump(result, file)
    # Engine threads and process groups of in-process engines can outlive main; the result is on disk.
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main()
