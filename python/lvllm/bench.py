"""`lvllm bench`: MoE layers of given sizes through the public API, each row beside the memory's read rate."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from lvllm.engine import Engine, MoELayer
from lvllm.native import load as load_native
from lvllm.ranges import parse_numbers

_MIN_LAYERS_BYTES = 256 << 20
"""Rotating over this much packed weight keeps caches from serving what decode would read from memory."""


def _time(layers: list[MoELayer], tokens: int, top_k: int, dtype: str, seconds: float) -> tuple[float, int]:
    """Median seconds of one forward, and packed bytes of its distinct experts."""
    import numpy as np

    generator = np.random.default_rng(0)
    first = layers[0]
    storage = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}[dtype]
    values = generator.standard_normal((tokens, first.hidden_size), dtype=np.float32)
    x = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values.astype(storage)
    weights = np.full((tokens, top_k), 1 / top_k, dtype=np.float32)
    # Every step of a real model routes differently; a handful of draws stands for that.
    draws = [
        np.stack([generator.permutation(first.num_experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
        for _ in range(8)
    ]
    output = np.empty_like(x)
    samples: list[float] = []
    counts: list[int] = []
    deadline = time.perf_counter() + seconds
    step = 0
    while time.perf_counter() < deadline or len(samples) < 8:
        layer, ids = layers[step % len(layers)], draws[step % len(draws)]
        begin = time.perf_counter()
        layer.forward(x, ids, weights, output=output)
        samples.append(time.perf_counter() - begin)
        counts.append(layer.bytes_of_step(ids))
        step += 1
    order = sorted(range(len(samples)), key=samples.__getitem__)
    middle = order[len(order) // 2]
    return samples[middle], counts[middle]


def main(args: argparse.Namespace) -> int:
    """Run the rows that the arguments ask for and print them; 2 for arguments that do not fit together."""
    try:
        token_counts = parse_numbers(args.tokens)
    except ValueError as error:
        print(f"lvllm bench: --tokens: {error}", file=sys.stderr)
        return 2
    if args.top_k > args.experts:
        print(f"lvllm bench: --top-k {args.top_k} is more than --experts {args.experts}", file=sys.stderr)
        return 2
    native = load_native()
    rows: list[dict[str, Any]] = []
    with Engine(threads=args.threads) as engine:
        facts = engine.describe()
        limit = native.read_bandwidth(facts["threads"])
        if not args.json:
            print(f"{facts['isa']}, {facts['threads']} threads, read rate {limit:.1f} GB/s, measured now")
            print(f"{'format':<10} {'tokens':>6} {'us/layer':>10} {'GB/s':>8} {'of read':>8} {'GFLOP/s':>9}")
        for fmt in args.format or ["bf16"]:
            shape = {
                "format": fmt,
                "num_experts": args.experts,
                "hidden_size": args.hidden_size,
                "intermediate_size": args.intermediate_size,
                "top_k": args.top_k,
                "dtype": args.dtype,
                "max_tokens": max(token_counts),
            }
            layers: list[MoELayer] = []
            try:
                while not layers or sum(layer.nbytes for layer in layers) < _MIN_LAYERS_BYTES:
                    layer = MoELayer(engine, name=f"bench.{len(layers)}", **shape)
                    layer.native.fill_dummy(len(layers))
                    layer.seal()
                    layers.append(layer)
            except (native.LkError, ValueError) as error:
                print(f"lvllm bench: {fmt}: {error}", file=sys.stderr)
                return 1
            for tokens in token_counts:
                seconds, count = _time(layers, tokens, args.top_k, args.dtype, args.seconds)
                flops = 6 * tokens * args.top_k * args.hidden_size * args.intermediate_size
                row = {
                    "format": fmt,
                    "tokens": tokens,
                    "us": round(seconds * 1e6, 1),
                    "gb_per_s": round(count / seconds / 1e9, 2),
                    "of_read": round(count / seconds / 1e9 / limit, 3),
                    "gflop_per_s": round(flops / seconds / 1e9, 1),
                }
                rows.append(row)
                if not args.json:
                    print(
                        f"{fmt:<10} {tokens:>6} {row['us']:>10} {row['gb_per_s']:>8} {row['of_read']:>8.1%} "
                        f"{row['gflop_per_s']:>9}"
                    )
    if args.json:
        print(json.dumps({"engine": facts, "read_gb_per_s": limit, "rows": rows}, default=str))
    return 0
