#!/usr/bin/env python3
"""End-to-end decode on vLLM's CPU platform: stock beside hybrid, in interleaved rounds.

usage: decode_cpu.py [--model models/lvllm-tiny | --random] [--rounds 3] [--tokens 64] [--batch 1]

Both sides run in processes of their own with the same settings (reserved cores included). The time of a
short generation is taken off that of a long one, so that prefill and request handling do not count.
--random makes a Qwen3-MoE config of 1 GB of bf16 experts (widths multiples of 128) with dummy weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANDOM = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048,
    "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 4096, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip

CHILD = """
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    llm = LLM(spec["model"], max_model_len=1024, dtype="bfloat16", enforce_eager=True,
              skip_tokenizer_init=True, load_format=spec["load_format"], seed=0)
    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 1000 + 5 for i in range(16)]}
               for j in range(spec["batch"])]

    def run(n):
        params = SamplingParams(max_tokens=n, min_tokens=n, temperature=0.0, ignore_eos=True,
                                detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(8)
    times = []
    for _ in range(3):
        short, long = run(8), run(8 + spec["tokens"])
        times.append((long - short) / spec["tokens"])
    print("RESULT", json.dumps(times))
"""


def measure(spec: dict[str, object], hybrid: bool) -> list[float]:
    env = os.environ | {
        "LVLLM_MOE_NUMA_ENABLED": "1" if hybrid else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with tempfile.NamedTemporaryFile("w", suffix=".py") as f:
        f.write(CHILD)
        f.flush()
        done = subprocess.run(
            [sys.executable, f.name, json.dumps(spec)],
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return [float(t) for t in json.loads(line.removeprefix("RESULT "))]
    sys.exit(f"no result:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default=str(ROOT / "models" / "lvllm-tiny"))
    ap.add_argument("--random", action="store_true")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--batch", type=int, default=1)
    ap.add_argument("--json")
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec: dict[str, object] = {
            "model": args.model,
            "load_format": "auto",
            "tokens": args.tokens,
            "batch": args.batch,
        }
        if args.random:
            (Path(folder) / "config.json").write_text(json.dumps(RANDOM))
            spec |= {"model": folder, "load_format": "dummy"}
        stock: list[float] = []
        ours: list[float] = []
        for _ in range(args.rounds):
            stock.append(min(measure(spec, hybrid=False)))
            ours.append(min(measure(spec, hybrid=True)))
    ratio = statistics.median(s / o for s, o in zip(stock, ours, strict=True))
    row = {
        "model": "random 1 GB" if args.random else Path(args.model).name,
        "batch": args.batch,
        "stock_ms": 1e3 * statistics.median(stock),
        "lvllm_ms": 1e3 * statistics.median(ours),
        "stock_over_lvllm": ratio,
    }
    print(
        f"{row['model']}: batch {args.batch}: stock {row['stock_ms']:.2f} ms a step, "
        f"lvllm {row['lvllm_ms']:.2f} ms; "
        f"stock / lvllm {ratio:.2f} (median of {args.rounds} interleaved rounds)"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
