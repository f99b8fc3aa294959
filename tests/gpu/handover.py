"""The hand-over on a GPU, without vLLM: correctness, time per layer, stress, failures. Needs torch with CUDA.

    python tests/gpu/handover.py [correct] [latency] [stress] [faults] [idle]     all when none is named

One JSON line per result; exit code 1 if any of them failed. The reference of every comparison is the blocking
`Layer.forward` on the CPU with the same rows, and comparisons are of bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lvllm import _lk

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CACHE = str(Path(tempfile.gettempdir()) / "lvllm-kernels")
FAILED = 0


def report(test: str, ok: bool, **facts: Any) -> None:
    global FAILED
    FAILED += not ok
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}
    print(json.dumps({"test": test, "ok": ok, **rounded}), flush=True)


def nvrtc_folders() -> list[str]:
    try:
        import nvidia
    except ImportError:
        return []
    found = (lib for root in nvidia.__path__ for lib in Path(root).glob("*/lib"))
    return [str(folder) for folder in found if any(folder.glob("libnvrtc.so*"))]


class House:
    """An engine with layers, connected to the GPU."""

    def __init__(
        self,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        dtype: torch.dtype,
        layers: int,
        capacity: int,
        weights: str | None = None,
        same: bool = False,
        step_timeout_s: float = 120.0,
        bytes_per_block: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.hidden, self.experts, self.top_k, self.dtype = hidden, experts, top_k, dtype
        self.capacity = capacity
        self.engine = _lk.Engine(step_timeout_s=step_timeout_s, reserve_cores=1, threads=threads)
        self.layers: list[_lk.Layer] = []
        for number in range(1 if same else layers):
            layer = self.engine.create_layer(
                f"model.layers.{number}.mlp.experts",
                format=weights or NAMES[dtype],
                num_experts=experts,
                hidden_size=hidden,
                intermediate_size=intermediate,
                top_k=top_k,
                dtype=NAMES[dtype],
            )
            layer.fill_dummy(number + 1)
            layer.seal()
            self.layers.append(layer)
        if same:
            self.layers *= layers
        self.way = self.attach(bytes_per_block)
        self.numbers = [self.way.add_layer(layer) for layer in self.layers]

    def attach(self, bytes_per_block: int | None = None) -> _lk.Handover:
        return self.engine.attach_cuda(
            torch.cuda.current_device(),
            capacity_tokens=self.capacity,
            max_hidden_size=self.hidden,
            max_top_k=self.top_k,
            dtype=NAMES[self.dtype],
            cache_dir=CACHE,
            nvrtc_dirs=nvrtc_folders(),
            bytes_per_block=bytes_per_block,
        )

    def forward(
        self, index: int, rows: Rows, output: torch.Tensor, mask: torch.Tensor | None = None, live: int = 0
    ) -> None:
        """Send and receive on the current stream, by parts of the capacity. live: address of a row count."""
        stream = torch.cuda.current_stream().cuda_stream
        number = self.numbers[index]
        for first in range(0, rows.x.shape[0], self.capacity):
            part = slice(first, min(first + self.capacity, rows.x.shape[0]))
            count = part.stop - first
            padding = (0 if mask is None else mask[part].data_ptr(), live)
            self.way.send(
                number,
                stream,
                rows.x[part].data_ptr(),
                rows.ids[part].data_ptr(),
                rows.weights[part].data_ptr(),
                count,
                *padding,
            )
            self.way.receive(number, stream, output[part].data_ptr(), count, *padding)

    def reference(self, index: int, rows: Rows, dead: torch.Tensor | None = None) -> torch.Tensor:
        """What the blocking call returns for the same rows; rows marked in `dead` have no experts."""
        x, weights = rows.x.cpu(), rows.weights.cpu()
        ids = rows.ids.cpu().clone()
        if dead is not None:
            ids[dead.cpu()] = -1
        out = torch.empty_like(x)
        for first in range(0, x.shape[0], self.capacity):
            part = slice(first, first + self.capacity)
            tensors = (x[part], ids[part], weights[part], out[part])
            refs = [
                _lk.TensorRef(t.data_ptr(), t.nbytes, n, tuple(t.shape), t)
                for t, n in zip(tensors, (NAMES[self.dtype], "i32", "f32", NAMES[self.dtype]), strict=True)
            ]
            self.layers[index].forward(*refs)
        return out


class Rows:
    """Static device tensors of a step."""

    def __init__(self, house: House, count: int) -> None:
        self.house = house
        self.x = torch.zeros(count, house.hidden, dtype=house.dtype, device="cuda")
        self.ids = torch.full((count, house.top_k), -1, dtype=torch.int32, device="cuda")
        self.weights = torch.zeros(count, house.top_k, dtype=torch.float32, device="cuda")

    def fill(self, generator: torch.Generator, holes: float = 0.1) -> Rows:
        """Fresh numbers in the same tensors; a share of the ids is -1."""
        count = self.x.shape[0]
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        ids = torch.stack(
            [
                torch.randperm(self.house.experts, generator=generator)[: self.house.top_k]
                for _ in range(count)
            ]
        ).to(torch.int32)
        ids[torch.rand(ids.shape, generator=generator) < holes] = -1
        self.ids.copy_(ids)
        self.weights.copy_(torch.rand(self.weights.shape, generator=generator))
        return self


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.cpu().view(kind), b.cpu().view(kind))


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def correct() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2048, 768, 32, 8), (130, 72, 6, 2)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hidden, intermediate, experts, top_k in shapes:
            house = House(
                hidden=hidden,
                intermediate=intermediate,
                experts=experts,
                top_k=top_k,
                dtype=dtype,
                layers=3,
                capacity=64,
            )
            bad = []
            for count in (1, 2, 3, 8, 17, 64, 65, 200):
                rows, out = (
                    Rows(house, count).fill(generator),
                    torch.full((count, hidden), 7, dtype=dtype, device="cuda"),
                )
                mask = torch.rand(count, generator=generator).lt(0.4).cuda()
                for index in range(3):
                    house.forward(index, rows, out)
                    if not same_bits(out, house.reference(index, rows)):
                        bad.append(f"eager {count} rows layer {index}")
                house.forward(0, rows, out, mask)
                if not same_bits(out, house.reference(0, rows, mask)) or out[mask].any():
                    bad.append(f"mask {count} rows")
                if count <= 64:
                    live = torch.tensor([count // 2 + 1], dtype=torch.int32, device="cuda")
                    house.forward(1, rows, out, None, live.data_ptr())
                    dead = torch.arange(count) >= count // 2 + 1
                    if not same_bits(out, house.reference(1, rows, dead)):
                        bad.append(f"row count {count} rows")
            # One graph per batch size, replayed in turns with fresh inputs and routing.
            sizes = [(count, Rows(house, count)) for count in (1, 4, 16, 100)]
            outs = {count: torch.zeros(3, count, hidden, dtype=dtype, device="cuda") for count, _ in sizes}
            masks = {count: torch.zeros(count, dtype=torch.bool, device="cuda") for count, _ in sizes}
            graphs = {}
            for count, rows in sizes:

                def body(house: House = house, rows: Rows = rows, out=outs[count], mask=masks[count]) -> None:
                    for index in range(3):
                        house.forward(index, rows, out[index], mask)

                graphs[count] = capture(body)
            for replay in range(6):
                for count, rows in sizes:
                    rows.fill(generator)
                    masks[count].copy_(torch.rand(count, generator=generator) < 0.3)
                    outs[count].fill_(3)
                    graphs[count].replay()
                    torch.cuda.synchronize()
                    for index in range(3):
                        want = house.reference(index, rows, masks[count])
                        if not same_bits(outs[count][index], want):
                            bad.append(f"replay {replay} of {count} rows layer {index}")
            house.way.check()
            report("correct", not bad, dtype=NAMES[dtype], hidden=hidden, bad=bad[:5], bad_count=len(bad))


def timed(graph: torch.cuda.CUDAGraph, replays: int, layers: int) -> list[float]:
    """µs a layer of each replay, by events."""
    times = []
    for replay in range(replays + 20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 20:
            times.append(begin.elapsed_time(end) * 1e3 / layers)
    return sorted(times)


def latency(hidden: int = 7168, layers: int = 60, replays: int = 200) -> None:
    for bytes_per_block in (32 << 10, 16 << 10, 8 << 10, 64 << 10):
        house = House(
            hidden=hidden,
            intermediate=32,
            experts=8,
            top_k=8,
            dtype=torch.bfloat16,
            layers=layers,
            capacity=64,
            same=True,
            bytes_per_block=bytes_per_block,
        )
        for count in (1, 4, 8):
            rows, out = Rows(house, count), torch.zeros(count, hidden, dtype=torch.bfloat16, device="cuda")

            def hops(house: House = house, rows: Rows = rows, out: torch.Tensor = out) -> None:
                for index in range(layers):
                    rows.x.add_(1)
                    house.forward(index, rows, out)

            def plain(rows: Rows = rows, out: torch.Tensor = out) -> None:
                for _ in range(layers):
                    rows.x.add_(1)
                    out.add_(1)

            plain()
            hops()
            torch.cuda.synchronize()
            base = statistics.median(timed(capture(plain), replays, layers))
            times = timed(capture(hops), replays, layers)
            house.way.check()
            median, p99 = statistics.median(times), times[int(len(times) * 0.99)]
            report(
                "latency",
                median - base < 30 and p99 < 200,
                hidden=hidden,
                layers=layers,
                rows=count,
                bytes_per_block=bytes_per_block,
                us_per_layer=median,
                p99_us=p99,
                best_us=times[0],
                two_plain_kernels_us=base,
                net_us=median - base,
            )


def stress(replays: int) -> None:
    generator = torch.Generator().manual_seed(2)
    house = House(
        hidden=512, intermediate=256, experts=16, top_k=4, dtype=torch.bfloat16, layers=8, capacity=32
    )
    sizes = [Rows(house, count) for count in (1, 5, 32)]
    outs = [torch.zeros(8, rows.x.shape[0], 512, dtype=torch.bfloat16, device="cuda") for rows in sizes]
    graphs = []
    for rows, out in zip(sizes, outs, strict=True):

        def body(rows: Rows = rows, out: torch.Tensor = out) -> None:
            for index in range(8):
                house.forward(index, rows, out[index])

        graphs.append(capture(body))
    # Payloads are prepared ahead, so that replays follow each other without a pause.
    bad, started, compared = 0, time.perf_counter(), 0
    for replay in range(replays):
        which = replay % 3
        if replay % 16 < 3:
            sizes[which].fill(generator, holes=0.3)
        else:
            sizes[which].x.add_(0.125)
        graphs[which].replay()
        if replay % 16 == 15 or replay % 16 < 3:
            index = replay % 8
            torch.cuda.synchronize()
            compared += 1
            bad += not same_bits(outs[which][index], house.reference(index, sizes[which]))
    torch.cuda.synchronize()
    house.way.check()
    requests = house.way.stats()["requests"]
    report(
        "stress",
        not bad,
        replays=replays,
        hops=replays * 8,
        compared=compared,
        bad=bad,
        requests=requests,
        seconds=time.perf_counter() - started,
    )


FAULTS = {
    # kind: (limit in s for the GPU to go on, words of the error)
    "panic_leader": (5.0, ["worker 0 failed: injected fault", "model.layers."]),
    "panic_worker": (5.0, ["worker 1 failed: injected fault", "model.layers."]),
    "stall_leader": (12.0, ["worker 0 running", "model.layers."]),
    "stall_worker": (12.0, ["worker 1 running", "model.layers."]),
    "bad_id": (5.0, ["topk_ids[0, 0]", "model.layers.0"]),
    "gpu_limit": (15.0, ["stopped waiting", "model.layers."]),
}
STALL_S = 40.0


def fault(kind: str) -> None:
    """Body of the subprocess of one fault."""
    generator = torch.Generator().manual_seed(3)
    house = House(
        hidden=256,
        intermediate=128,
        experts=8,
        top_k=2,
        dtype=torch.bfloat16,
        layers=4,
        capacity=8,
        step_timeout_s=2.0,
        threads=4,
    )
    rows = Rows(house, 4).fill(generator, holes=0)
    outs = torch.zeros(4, 4, 256, dtype=torch.bfloat16, device="cuda")

    def body() -> None:
        for index in range(4):
            house.forward(index, rows, outs[index])

    graph = capture(body)
    graph.replay()
    torch.cuda.synchronize()
    house.way.check()
    keep = None
    if kind == "bad_id":
        rows.ids[0, 0] = 99
    else:
        if kind == "gpu_limit":
            # The watchdog now tells the second hand-over of a hang; the first one's GPU is on its own.
            keep = house.attach()
        house.engine.inject_fault(
            0 if kind.endswith("leader") else 1,
            "panic" if kind.startswith("panic") else "stall",
            STALL_S,
        )
    outs.fill_(5)
    started = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    went_on = time.perf_counter() - started
    zeros = not outs.any().item()
    started = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    again = time.perf_counter() - started
    try:
        house.way.check()
        text = ""
    except _lk.LkError as error:
        text = str(error)
    try:
        house.forward(0, rows, outs[0])
        raises = False
    except _lk.LkError:
        raises = True
    limit, words = FAULTS[kind]
    ok = zeros and raises and went_on < limit and again < 0.5 and all(w in text for w in words)
    del keep
    report(f"fault:{kind}", ok, went_on_s=went_on, again_s=again, zeros=zeros, raises=raises, text=text)


def faults() -> None:
    for kind in FAULTS:
        started = time.perf_counter()
        try:
            child = subprocess.run(
                [sys.executable, __file__, "--fault", kind],
                capture_output=True,
                text=True,
                timeout=STALL_S + 50,
            )
        except subprocess.TimeoutExpired:
            report(f"fault:{kind}", False, exit="did not exit")
            continue
        lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
        if not lines:
            report(f"fault:{kind}", False, exit=child.returncode, text=child.stderr[-1500:])
            continue
        facts = json.loads(lines[-1])
        ok = facts.pop("ok") and child.returncode == 0
        report(facts.pop("test"), ok, exit=child.returncode, seconds=time.perf_counter() - started, **facts)


def idle() -> None:
    house = House(
        hidden=2048, intermediate=32, experts=8, top_k=8, dtype=torch.bfloat16, layers=1, capacity=8
    )
    rows, out = Rows(house, 1), torch.zeros(1, 2048, dtype=torch.bfloat16, device="cuda")
    graph = capture(lambda: house.forward(0, rows, out))
    hot = statistics.median(timed(graph, 100, 1))

    def first_after(seconds: float, wake: bool) -> float:
        took = []
        for _ in range(20):
            time.sleep(seconds)
            if wake:
                house.way.wake()
                time.sleep(0.0005)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(took)

    cold, woken = first_after(0.1, False), first_after(0.1, True)
    time.sleep(0.5)
    cpu, wall = time.process_time(), time.perf_counter()
    time.sleep(3)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    report(
        "idle",
        cold - hot < 150 and share < 0.15,
        hot_us=hot,
        first_after_idle_us=cold,
        first_after_wake_us=woken,
        idle_cores=share,
        trial_us=house.way.describe()["round_trip_us"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="correct, latency, stress, faults, idle")
    parser.add_argument("--replays", type=int, default=3000, help="of the stress test")
    parser.add_argument("--fault", choices=FAULTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fault:
        fault(args.fault)
        sys.exit(FAILED > 0)
    house = House(hidden=64, intermediate=32, experts=4, top_k=2, dtype=torch.float32, layers=1, capacity=8)
    report(
        "machine",
        True,
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        engine=house.engine.describe()["isa"],
        threads=house.engine.describe()["threads"],
        **house.way.describe(),
    )
    del house
    tests: dict[str, Callable[[], None]] = {
        "correct": correct,
        "latency": latency,
        "stress": lambda: stress(args.replays),
        "faults": faults,
        "idle": idle,
    }
    for name in args.tests or tests:
        try:
            tests[name]()
        except Exception as error:
            report(name, False, error=f"{type(error).__name__}: {error}")
    sys.exit(FAILED > 0)


if __name__ == "__main__":
    main()
