"""Byte-level BPE of the small model, with the ChatML special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Tokenizer of exactly `vocab_size` entries: special tokens, 256 bytes, merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"text too small: {tokenizer.get_vocab_size()} of {vocab_size} entries")
    return tokenizer


def write(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [TURN_START, TURN_END],
        "chat_template": CHAT_TEMPLATE,
        **tokens,
    }
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", tokens)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def turns(*messages: str) -> str:
    """`messages` of user and assistant, alternating, as the chat template renders them."""
    roles = ("user", "assistant")
    return "".join(f"{TURN_START}{roles[i % 2]}\n{text}{TURN_END}\n" for i, text in enumerate(messages))
