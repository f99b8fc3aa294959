"""Perplexity of a checkpoint on the held-out text.

The text is cut in windows of ``window - 1`` tokens, each preceded by ``<|endoftext|>``; every
token of the text is scored once. Arithmetic is float32 on the stored (bfloat16) weights. The
backend ``vllm`` scores the same windows by prompt log-probabilities, so that any quantised
checkpoint or engine can be compared with the number in ``eval.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

WINDOW = 1024


def windows(tokens: list[int], prefix: int, window: int = WINDOW) -> list[list[int]]:
    """Token lists of at most `window` entries that begin with `prefix`."""
    step = window - 1
    return [[prefix, *tokens[i : i + step]] for i in range(0, len(tokens), step)]


def summary(loss_sum: float, tokens: int, text_bytes: int) -> dict[str, Any]:
    """Mean loss (nats a token), perplexity, bits a byte of UTF-8."""
    loss = loss_sum / tokens
    return {
        "loss": round(loss, 5),
        "perplexity": round(math.exp(loss), 4),
        "bits_per_byte": round(loss_sum / math.log(2) / text_bytes, 5),
        "tokens": tokens,
        "bytes": text_bytes,
        "window": WINDOW,
    }


def loss_torch(model: Any, tokens: list[int], prefix: int, device: str = "cpu") -> float:
    """Sum of the negative log-likelihoods of `tokens` by the torch model, in float32."""
    import torch
    import torch.nn.functional as F

    model = model.to(device).float().eval()
    total = 0.0
    with torch.no_grad():
        for window in windows(tokens, prefix):
            ids = torch.tensor([window], device=device)
            logits, _ = model(ids[:, :-1])
            total += F.cross_entropy(logits[0].float(), ids[0, 1:], reduction="sum").item()
    return total


def loss_vllm(folder: Path, tokens: list[int], prefix: int, dtype: str = "float32") -> float:
    """The same sum by vLLM's prompt log-probabilities."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(folder), dtype=dtype, max_model_len=WINDOW + 8, enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": window} for window in windows(tokens, prefix)]
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    total = 0.0
    for prompt, output in zip(prompts, llm.generate(prompts, parameters), strict=True):
        scored = zip(prompt["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True)
        total -= sum(entry[token].logprob for token, entry in scored)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--text", type=Path, help="default: heldout.txt of the folder")
    parser.add_argument("--backend", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--dtype", default="float32", help="of the vllm backend")
    parser.add_argument("--max-tokens", type=int, default=None)
    arguments = parser.parse_args()

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    text = (arguments.text or arguments.model / "heldout.txt").read_text(encoding="utf-8")
    tokens = tokenizer.encode(text).ids[: arguments.max_tokens]
    text_bytes = len(tokenizer.decode(tokens).encode())
    prefix = tokenizer.token_to_id("<|endoftext|>")
    if arguments.backend == "vllm":
        loss = loss_vllm(arguments.model, tokens, prefix, arguments.dtype)
    else:
        from export import from_checkpoint

        loss = loss_torch(from_checkpoint(arguments.model), tokens, prefix)
    print(json.dumps(summary(loss, len(tokens), text_bytes)))


if __name__ == "__main__":
    main()
