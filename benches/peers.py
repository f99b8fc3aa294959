#!/usr/bin/env python3
"""The whole MoE layer beside its limits and beside vLLM's CPU operators, in interleaved rounds.

usage: peers.py [--shape qwen3-30b] [--tokens 1,4,16] [--rounds 5] [--threads N] [--no-peer] [--json FILE]

Each row: tokens, µs per layer call (median of rounds), the roofline's time from limits measured in the
same rounds (bytes of the distinct experts once over the read rate; 6·T·k·H·I over the best measured peak),
the fraction reached, the relative error against float32, and the median of (peer / ours) with the peer's
own fraction. Weights are random; several layers rotate so that no step finds its experts in a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
from lvllm import _lk

Pair = tuple[torch.Tensor, torch.Tensor]  # w13 [E, 2I, H], w2 [E, H, I]

SHAPES = {  # hidden_size, intermediate_size, experts, top_k
    "qwen3-30b": (2048, 768, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "deepseek-v3-16": (7168, 2048, 16, 8),
    "small": (256, 128, 16, 4),
}


def ref(t: torch.Tensor) -> _lk.TensorRef:
    names = {torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32"}
    return _lk.TensorRef(t.data_ptr(), t.nbytes, names[t.dtype], list(t.shape), t)


class Ours:
    def __init__(self, args: argparse.Namespace, weights: list[Pair], shape: tuple[int, ...]) -> None:
        h, i, e, k = shape
        self.engine = _lk.Engine(threads=args.threads, isa=args.isa, kernel=args.kernel)
        self.layers = []
        for n, (w13, w2) in enumerate(weights):
            layer = self.engine.create_layer(
                f"layer{n}",
                format="bf16",
                num_experts=e,
                hidden_size=h,
                intermediate_size=i,
                top_k=k,
                dtype="bf16",
            )
            for x in range(e):
                layer.load_expert(x, {"w13_weight": ref(w13[x]), "w2_weight": ref(w2[x])})
            layer.seal()
            self.layers.append(layer)

    def __call__(self, n: int, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self.layers[n].forward(ref(x), ref(ids), ref(w), ref(out))
        return out


class VllmOperators:
    """vLLM's `cpu_fused_moe` as its CPU backend calls it."""

    def __init__(self, args: argparse.Namespace, weights: list[Pair], shape: tuple[int, ...]) -> None:
        import vllm._custom_ops as ops
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        self.ops = ops
        self.isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        self.layers = [
            (ops.cpu_prepack_moe_weight(a, self.isa), ops.cpu_prepack_moe_weight(b, self.isa))
            for a, b in weights
        ]

    def __call__(self, n: int, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        a, b = self.layers[n]
        self.ops.cpu_fused_moe(out, x, a, b, None, None, w, ids, "silu", self.isa)
        return out


def reference(weights: Pair, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w13, w2 = weights
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in ids.unique().tolist():
        t, j = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[t].float() @ w13[e].float().t()).chunk(2, -1)
        out.index_add_(0, t, (torch.nn.functional.silu(gate) * up @ w2[e].float().t()) * w[t, j, None])
    return out


def percent(floors: list[float], times: list[float]) -> float:
    return 100 * statistics.median(f / t for f, t in zip(floors, times, strict=True))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--shape", choices=SHAPES, default="qwen3-30b")
    ap.add_argument("--tokens", default="1,4,16,64,256,1024")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument("--layers", type=int, default=0, help="layers that rotate (0: enough for 1.5 GB)")
    ap.add_argument("--seconds", type=float, default=0.15, help="per measurement")
    ap.add_argument("--no-peer", action="store_true")
    ap.add_argument("--isa")
    ap.add_argument("--kernel")
    ap.add_argument("--json")
    args = ap.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    h, i, e, k = shape
    layer_bytes = e * 3 * h * i * 2
    count = args.layers or max(1, -(-1_500_000_000 // layer_bytes))
    weights = [
        (
            torch.randn(e, 2 * i, h, dtype=torch.bfloat16).mul_(h**-0.5),
            torch.randn(e, h, i, dtype=torch.bfloat16).mul_(i**-0.5),
        )
        for _ in range(count)
    ]
    contenders: dict[str, Any] = {"lvllm": Ours(args, weights, shape)}
    if not args.no_peer:
        try:
            contenders["vllm"] = VllmOperators(args, weights, shape)
        except Exception as error:
            print(f"peer left out: {type(error).__name__}: {error}")
    print(f"{args.shape}: H {h}, I {i}, {e} experts, top-{k}, {count} layers, {args.threads} threads, bf16")
    print(f"engine: {contenders['lvllm'].engine.describe()['isa']}")
    for matrix, kernels in contenders["lvllm"].layers[0].kernels().items():
        print(f"{matrix}: " + ", ".join(f"{rows}: {name}" for rows, name in kernels.items()))
    heads = (
        "tokens",
        "µs",
        "floor µs",
        "lvllm %",
        "peer %",
        "peer/ours",
        "GB/s",
        "GFLOP/s",
        "rel.err",
        "read GB/s",
        "peak",
    )
    print(" ".join(f"{head:>9}" for head in heads))
    rows = []
    for tokens in [int(t) for t in args.tokens.split(",")]:
        steps = []
        for _ in range(8):
            scores = torch.rand(tokens, e)
            ids = scores.topk(k, -1).indices.to(torch.int32).contiguous()
            w = torch.rand(tokens, k)
            steps.append(
                (
                    torch.randn(tokens, h, dtype=torch.bfloat16),
                    ids,
                    (w / w.sum(-1, keepdim=True)).contiguous(),
                )
            )
        distinct = statistics.mean(len(s[1].unique()) for s in steps)
        x, ids, w = steps[0]
        want = reference(weights[0], x, ids, w)
        errors = {
            n: ((c(0, x, ids, w).float() - want).norm() / want.norm()).item() for n, c in contenders.items()
        }
        times: dict[str, list[float]] = {n: [] for n in contenders}
        reads, peaks = [], []
        at = 0
        for _ in range(args.rounds):
            reads.append(_lk.read_bandwidth(args.threads))
            measured = _lk.compute_peaks(args.threads)
            # What exact mode may use; int8 products are not.
            peaks.append(max(v for k, v in measured.items() if k in ("f32fma", "bf16dot", "bf16amx")))
            for name, call in contenders.items():
                call(at % count, *steps[at % 8])
                n, begin = 0, time.perf_counter()
                while n < 3 or time.perf_counter() - begin < args.seconds:
                    at += 1
                    n += 1
                    call(at % count, *steps[at % 8])
                times[name].append((time.perf_counter() - begin) / n)
        bytes_ = distinct * 3 * h * i * 2
        flops = 6 * tokens * k * h * i
        # The machine's rate drifts, so each round is held against its own limits.
        floors = [max(bytes_ / (r * 1e9), flops / (p * 1e9)) for r, p in zip(reads, peaks, strict=True)]
        read, peak, floor = statistics.median(reads), statistics.median(peaks), statistics.median(floors)

        mine = statistics.median(times["lvllm"])
        row = {
            "tokens": tokens,
            "us": mine * 1e6,
            "floor_us": floor * 1e6,
            "percent": percent(floors, times["lvllm"]),
            "gb_s": bytes_ / mine / 1e9,
            "gflop_s": flops / mine / 1e9,
            "rel_err": errors["lvllm"],
            "read_gb_s": read,
            "peak_gflop_s": peak,
        }
        if "vllm" in times:
            row["peer_percent"] = percent(floors, times["vllm"])
            row["peer_over_ours"] = statistics.median(
                p / o for p, o in zip(times["vllm"], times["lvllm"], strict=True)
            )
            row["peer_rel_err"] = errors["vllm"]
        rows.append(row)
        nan = float("nan")
        cells = [
            f"{tokens}",
            f"{mine * 1e6:.1f}",
            f"{floor * 1e6:.1f}",
            f"{row['percent']:.1f}",
            f"{row.get('peer_percent', nan):.1f}",
            f"{row.get('peer_over_ours', nan):.2f}",
            f"{row['gb_s']:.1f}",
            f"{row['gflop_s']:.0f}",
            f"{errors['lvllm']:.1e}",
            f"{read:.1f}",
            f"{peak:.0f}",
        ]
        print(" ".join(f"{cell:>9}" for cell in cells), flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"shape": args.shape, "threads": args.threads, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
