"""Text of the exported model for a few fixed prompts, to be read by a person."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from export import from_checkpoint
from model import Qwen3Moe

CHATS = (
    "Hello!",
    "Tell me a story about a fox.",
    "Tell me a story.",
    "Tell me about Sherlock Holmes.",
    "What is the capital of France?",
)
COMPLETIONS = ("Once upon a time there was a king who had", "The old man looked at the sea and")


@torch.no_grad()
def generate(
    model: Qwen3Moe,
    tokens: list[int],
    stop: set[int],
    count: int,
    temperature: float,
    generator: torch.Generator,
) -> list[int]:
    """Up to `count` tokens after `tokens`; the whole prefix is computed again for each."""
    made: list[int] = []
    while len(made) < count:
        logits = model(torch.tensor([tokens + made]))[0][0, -1].float()
        if temperature == 0.0:
            token = int(logits.argmax())
        else:
            probability = (logits / temperature).softmax(dim=-1)
            token = int(torch.multinomial(probability, 1, generator=generator))
        if token in stop:
            break
        made.append(token)
    return made


def write_samples(folder: Path, count: int = 160) -> None:
    """``samples.txt`` in `folder`; without the package tokenizers nothing is written."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        print("tokenizers is not installed: no samples")
        return
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop = set(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])
    model = from_checkpoint(folder)
    generator = torch.Generator().manual_seed(0)
    prompts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in CHATS]
    blocks: list[str] = []
    for shown, prompt in zip([*CHATS, *COMPLETIONS], [*prompts, *COMPLETIONS], strict=True):
        ids = tokenizer.encode("<|endoftext|>" + prompt).ids
        for temperature in (0.0, 0.7):
            made = generate(model, ids, stop, count, temperature, generator)
            blocks.append(f"[{shown}] temperature {temperature}\n{tokenizer.decode(made)}\n")
    (folder / "samples.txt").write_text("\n".join(blocks), encoding="utf-8")
