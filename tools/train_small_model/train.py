"""Trains the small Qwen3-MoE model and writes a checkpoint that stock vLLM serves.

    python3 train.py --data TOKENS --out MODEL --minutes 4

TOKENS is the folder written by data.py. One GPU, or the CPU for a smoke test (--steps 20
--batch 2). The number of steps is fixed after the speed of the first steps was measured, so that
the learning rate's cosine ends with the time; ``eval.json`` records it, and ``--steps`` repeats a
run. The weights kept are those with the lowest validation loss. Needs torch, numpy, safetensors.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import evaluate
import export
import numpy as np
import torch
import torch.nn.functional as F
from model import Config, Qwen3Moe
from sample import write_samples
from torch import Tensor

BALANCE_COEFFICIENT = 0.01
WARM_UP = 200
VALIDATIONS = 20


class Batches:
    """Random windows of the token streams, chat windows starting at a conversation."""

    def __init__(self, data: Path, length: int, chat_share: float, device: torch.device) -> None:
        def stream(name: str) -> Tensor:
            ids = np.fromfile(data / f"{name}.bin", dtype="<u2").astype(np.int32)
            return torch.from_numpy(ids).to(device)

        self.plain, self.chat, valid = stream("plain"), stream("chat"), stream("valid")
        separator = json.loads((data / "meta.json").read_text(encoding="utf-8"))["special"]["pad"]
        starts = (self.chat == separator).nonzero().flatten()
        self.starts = starts[starts < len(self.chat) - length - 1]
        self.span = torch.arange(length + 1, device=device)
        self.chat_share = chat_share
        count = (len(valid) - 1) // length
        self.valid = valid[: count * length + 1].long().unfold(0, length + 1, length)
        if device.type == "cpu":  # a smoke test
            self.valid = self.valid[:2]

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        """int64 ``[batch, length + 1]``."""
        chats = round(batch * self.chat_share)
        device = self.span.device
        high = len(self.plain) - len(self.span)
        begin = torch.randint(high, (batch - chats, 1), generator=generator, device=device)
        pick = torch.randint(len(self.starts), (chats,), generator=generator, device=device)
        windows = self.plain[begin + self.span], self.chat[self.starts[pick][:, None] + self.span]
        return torch.cat(windows).long()


def optimiser(model: Qwen3Moe, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW; norms and embeddings are not decayed."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() > 1 and "embed" not in name
        (decayed if matrix else free).append(parameter)
    groups = [{"params": decayed, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def rate_at(step: int, total: int, peak: float) -> float:
    """Linear warm-up, then cosine to 2 % of the peak."""
    warm = min(WARM_UP, max(1, total // 10))
    if step < warm:
        return peak * (step + 1) / warm
    progress = min(1.0, (step - warm) / max(1, total - warm))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        meta = json.loads((arguments.data / "meta.json").read_text(encoding="utf-8"))
        config = replace(Config(), **meta["config"])
        self.model = Qwen3Moe(config, arguments.dropout)
        self.model.initialise(torch.Generator().manual_seed(arguments.seed))
        self.model.to(self.device)
        self.call: Any = self.model
        self.batch, self.peak = arguments.batch, arguments.rate
        self.batches = Batches(arguments.data, arguments.length, arguments.chat_share, self.device)
        self.generator = torch.Generator(self.device).manual_seed(arguments.seed)
        self.optimiser = optimiser(self.model, arguments.rate, arguments.decay)

    def compile(self) -> None:
        """Compiles the model if that works here; training is correct without."""
        compiled = torch.compile(self.model)
        try:
            for _ in range(2):
                self.loss(compiled, self.batches.draw(self.batch, self.generator))[0].backward()
            self.call = compiled
        except Exception as error:  # whatever fails in the compiler, eager works
            print(f"torch.compile failed, running eagerly: {error}", flush=True)
        self.optimiser.zero_grad(set_to_none=True)

    def loss(self, call: Any, window: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy in nats a token, and the balancing loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits, balance = call(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten()), balance

    def step(self, index: int, total: int) -> tuple[Tensor, Tensor]:
        for group in self.optimiser.param_groups:
            group["lr"] = rate_at(index, total, self.peak)
        loss, balance = self.loss(self.call, self.batches.draw(self.batch, self.generator))
        (loss + BALANCE_COEFFICIENT * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach(), balance.detach()

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        losses = [self.loss(self.model, w)[0].item() for w in self.batches.valid.split(8)]
        sizes = [len(w) for w in self.batches.valid.split(8)]
        self.model.train()
        return float(np.average(losses, weights=sizes))

    def synchronise(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the training and leaves the checkpoint in ``arguments.out``; returns eval.json."""
    trainer = Trainer(arguments)
    model = trainer.model
    begin = trainer.synchronise()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters on {trainer.device}", flush=True)
    if trainer.device.type == "cuda" and not arguments.no_compile:
        trainer.compile()
        print(f"compiled in {trainer.synchronise() - begin:.0f} s", flush=True)
    total = arguments.steps or 1_000_000
    probe = (20, 70)  # steps between which the speed is measured
    best, best_state, history = math.inf, copy.deepcopy(model.state_dict()), []
    started = mark = trainer.synchronise()
    step = 0
    while step < total:
        loss, balance = trainer.step(step, total)
        step += 1
        if not arguments.steps and step == probe[0]:
            mark = trainer.synchronise()
        elif not arguments.steps and step == probe[1]:
            each = (trainer.synchronise() - mark) / (probe[1] - probe[0])
            left = arguments.minutes * 60 - (time.perf_counter() - started)
            # Validation and drift of the clock take a few percent.
            total = step + max(50, int(0.96 * left / each))
            speed = arguments.batch * arguments.length / each / 1e6
            print(f"{each * 1e3:.2f} ms a step, {speed:.2f} M tokens/s: {total} steps", flush=True)
        if total < 1_000_000 and (step % max(1, total // VALIDATIONS) == 0 or step == total):
            valid = trainer.validate()
            elapsed = trainer.synchronise() - started
            history.append([step, round(loss.item(), 4), round(valid, 4)])
            print(
                f"step {step}/{total} train {loss.item():.4f} valid {valid:.4f}"
                f" balance {balance.item():.3f} {elapsed:.0f} s", flush=True,
            )  # fmt: skip
            if valid < best:
                best, best_state = valid, copy.deepcopy(model.state_dict())
    seconds = trainer.synchronise() - started
    model.load_state_dict(best_state)
    export.write(model, arguments.data, arguments.out)
    return {
        "parameters": parameters,
        "training": {
            "steps": total, "tokens": total * arguments.batch * arguments.length,
            "seconds": round(seconds, 1), "seed": arguments.seed, "batch": arguments.batch,
            "length": arguments.length, "rate": arguments.rate, "decay": arguments.decay,
            "dropout": arguments.dropout, "chat_share": arguments.chat_share,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
            "best_validation_loss": round(best, 4), "history": history,
        },
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Held-out figures of the exported weights, computed in float32."""
    torch.set_float32_matmul_precision("highest")
    meta = json.loads((arguments.data / "meta.json").read_text(encoding="utf-8"))
    tokens = np.fromfile(arguments.data / "heldout.bin", dtype="<u2").tolist()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = export.from_checkpoint(arguments.out)
    loss = evaluate.loss_torch(model, tokens, meta["special"]["pad"], device)
    return evaluate.summary(loss, len(tokens), meta["heldout_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=None, help="instead of --minutes")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--chat-share", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    record = train(arguments)
    record = {"heldout": measure(arguments), **record}
    (arguments.out / "eval.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_samples(arguments.out)
    print(json.dumps(record["heldout"]))


if __name__ == "__main__":
    main()
