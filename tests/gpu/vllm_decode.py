"""vLLM on a GPU with experts on the CPU: time per decode step, and equality with stock vLLM on tiny models.

    python tests/gpu/vllm_decode.py bench [--stock | --uva] [--layers N] [--graphs MODE]
    python tests/gpu/vllm_decode.py equal [KIND ...] [--modes eager,full,default]

`bench` serves a config with the dimensions of Qwen3-30B-A3B and dummy weights; `equal` writes tiny
checkpoints (tools/make_tiny_moe.py) and compares greedy tokens in float32. One JSON line per result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "default": {},
}
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")


def report(**facts: Any) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}), flush=True)


def environment(hybrid: bool) -> dict[str, str]:
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LVLLM_MOE_NUMA_ENABLED": "1" if hybrid else "0",
    }
    return env


def bench_body(args: argparse.Namespace) -> None:
    """Runs in a process of its own, whose environment says where the experts are."""
    begin = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"num_hidden_layers": args.layers}))
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if args.uva:
        options |= {"cpu_offload_gb": 100, "cpu_offload_params": {"experts"}}
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.9 if args.stock else 0.5,
        attention_config={"backend": args.attention},
        enable_prefix_caching=False,
        seed=0,
        **options,
        **MODES[args.graphs],
    )
    report(
        test="start", hybrid=not (args.stock or args.uva), uva=args.uva, seconds=time.perf_counter() - begin
    )

    def run(batch: int, tokens: int, prompt: int = 16) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * i + 13 * j) % 5000 + 100 for j in range(prompt)]} for i in range(batch)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - started
        assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
        return took

    for batch in (1, 4):
        run(batch, 8)
        short, long = 8, args.tokens
        steps = []
        for _ in range(3):
            few, many = run(batch, short), run(batch, long)
            steps.append((many - few) / (long - short) * 1e3)
        steps.sort()
        report(
            test="decode",
            stock=args.stock,
            uva=args.uva,
            graphs=args.graphs,
            layers=args.layers,
            batch=batch,
            ms_per_step=steps[1],
            best_ms=steps[0],
            tokens_per_s=batch * 1e3 / steps[1],
        )
    if args.prefill:
        run(1, 1, 1024)
        report(test="prefill", tokens=1024, seconds=run(1, 1, 1024))
    if not (args.stock or args.uva):
        from lvllm.vllm import handover, worker

        for hub in handover._HUBS.values():
            assert hub.native is not None
            report(test="handover", **hub.native.describe(), **hub.native.stats())
            report(test="engine", line=worker.describe_line(hub.engine.describe()))
    sys.stdout.flush()
    os._exit(0)


def bench(args: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "bench-body", *sys.argv[2:]]
    return subprocess.run(command, env=environment(not (args.stock or args.uva)), check=False).returncode


def run_engine(model: Path, hybrid: bool, engine: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    out = model / "result.json"
    out.unlink(missing_ok=True)
    options = {"gpu_memory_utilization": 0.2, "max_num_batched_tokens": 256} | engine
    job = {"model": str(model), "out": str(out), "engine": options}
    child = subprocess.run(
        [sys.executable, str(ROOT / "tests/vllm/run_engine.py"), json.dumps(job)],
        env=environment(hybrid),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if not out.exists():
        return None, (child.stdout + child.stderr)[-2500:]
    result: dict[str, Any] = json.loads(out.read_text())["generate"][0]
    return result, child.stdout + child.stderr


def equal(args: argparse.Namespace) -> int:
    root = Path(tempfile.mkdtemp())
    failed = 0
    kinds = args.kinds or list(KINDS)
    subprocess.run([sys.executable, str(ROOT / "tools/make_tiny_moe.py"), str(root), *kinds], check=True)
    for kind in kinds:
        backend = {} if kind.startswith("deepseek") else {"attention_config": {"backend": args.attention}}
        stock, text = run_engine(root / kind, False, backend | MODES["eager"])
        if stock is None:
            report(test="equal", kind=kind, ok=False, error="stock does not run", text=text)
            failed += 1
            continue
        for mode in args.modes.split(","):
            ours, text = run_engine(root / kind, True, backend | MODES[mode])
            if ours is None:
                report(test="equal", kind=kind, mode=mode, ok=False, text=text)
                failed += 1
                continue
            pairs = [
                (a, b)
                for x, y in zip(stock["tokens"], ours["tokens"], strict=True)
                for a, b in zip(x, y, strict=True)
            ]
            alike = sum(a == b for a, b in pairs)
            apart = max(
                abs(a - b)
                for x, y in zip(stock["prompt_logprobs"], ours["prompt_logprobs"], strict=True)
                for a, b in zip(x, y, strict=True)
            )
            handed = "hand-over to cuda" in text
            ok = alike == len(pairs) and handed
            failed += not ok
            report(
                test="equal",
                kind=kind,
                mode=mode,
                ok=ok,
                tokens=len(pairs),
                alike=alike,
                max_prompt_dlogprob=apart,
                handed_over=handed,
            )
    return failed > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("bench", "bench-body"):
        sub = commands.add_parser(name)
        sub.add_argument("--stock", action="store_true", help="all on the GPU")
        sub.add_argument("--uva", action="store_true", help="stock, experts in host memory over the link")
        sub.add_argument("--layers", type=int, default=48)
        sub.add_argument("--tokens", type=int, default=72)
        sub.add_argument("--graphs", choices=MODES, default="full")
        sub.add_argument("--attention", default="FLASH_ATTN")
        sub.add_argument("--prefill", action="store_true", help="and the time of a prompt of 1,024 tokens")
    sub = commands.add_parser("equal")
    sub.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    sub.add_argument("--modes", default="eager,full,default")
    sub.add_argument("--attention", default="TRITON_ATTN")
    args = parser.parse_args()
    if args.command == "bench-body":
        bench_body(args)
    sys.exit(bench(args) if args.command == "bench" else equal(args))


if __name__ == "__main__":
    main()
