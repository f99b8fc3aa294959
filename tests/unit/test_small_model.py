"""The committed small model: complete, of the promised size, and consistent with its records."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).resolve().parents[2] / "models" / "lvllm-tiny"
FILES = (
    "config.json",
    "eval.json",
    "generation_config.json",
    "heldout.txt",
    "model.safetensors",
    "README.md",
    "tokenizer.json",
    "tokenizer_config.json",
)


def read(name: str) -> Any:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


def header() -> dict[str, Any]:
    """Tensor table of the checkpoint, without the metadata."""
    with (MODEL / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        table: dict[str, Any] = json.loads(file.read(size))
    table.pop("__metadata__", None)
    return table


@pytest.mark.parametrize("name", FILES)
def test_file_is_there(name: str) -> None:
    assert (MODEL / name).stat().st_size > 0


def test_size() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 12_000_000
    assert (MODEL / "heldout.txt").stat().st_size <= 200_000


def test_widths_are_whole_panels() -> None:
    config = read("config.json")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    for name in ("hidden_size", "moe_intermediate_size", "vocab_size"):
        assert config[name] % 128 == 0, name
    assert config["num_attention_heads"] * config["head_dim"] % 128 == 0
    assert config["num_key_value_heads"] * config["head_dim"] % 128 == 0
    assert config["num_experts_per_tok"] < config["num_experts"]


def test_tensors_match_config() -> None:
    config = read("config.json")
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = {
            "q_proj": [query, hidden],
            "k_proj": [key, hidden],
            "v_proj": [key, hidden],
            "o_proj": [hidden, query],
            "q_norm": [config["head_dim"]],
            "k_norm": [config["head_dim"]],
        }
        expected |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        expected[f"{prefix}input_layernorm.weight"] = [hidden]
        expected[f"{prefix}post_attention_layernorm.weight"] = [hidden]
        expected[f"{prefix}mlp.gate.weight"] = [config["num_experts"], hidden]
        for expert in range(config["num_experts"]):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = [hidden, inner] if name == "down_proj" else [inner, hidden]
                expected[f"{prefix}mlp.experts.{expert}.{name}.weight"] = shape
    table = header()
    assert {name: entry["shape"] for name, entry in table.items()} == expected
    assert {entry["dtype"] for entry in table.values()} == {"BF16"}
    assert sum(math.prod(entry["shape"]) for entry in table.values()) == read("eval.json")["parameters"]


def test_eval_record_is_consistent() -> None:
    record = read("eval.json")
    heldout, training = record["heldout"], record["training"]
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    assert heldout["bytes"] == len(text.encode())
    assert heldout["perplexity"] == pytest.approx(math.exp(heldout["loss"]), rel=1e-4)
    bits = heldout["loss"] * heldout["tokens"] / math.log(2) / heldout["bytes"]
    assert heldout["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    # General compressors need more than 2 bits a byte for this text; fluent English needs less than 1.6.
    assert heldout["bits_per_byte"] < 1.6
    assert training["best_validation_loss"] == min(valid for _, _, valid in training["history"])


def test_card_states_the_recorded_perplexity() -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert f"perplexity | {read('eval.json')['heldout']['perplexity']:.2f} a token" in card


def test_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    config = read("config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    assert tokenizer.token_to_id("<|endoftext|>") == config["pad_token_id"]
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    tokens = tokenizer.encode(text).ids
    assert len(tokens) == read("eval.json")["heldout"]["tokens"]
    assert tokenizer.decode(tokens) == text
    for other in ("Grüße, 東京 \u2013 naïve\n\tx = 3;", " leading and trailing "):
        assert tokenizer.decode(tokenizer.encode(other).ids) == other


def test_chat_template() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(read("tokenizer_config.json")["chat_template"])
    messages = [{"role": "user", "content": "Hello"}]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_perplexity_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored weights give the recorded loss (all of the text, float32, a few seconds)."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.syspath_prepend(str(MODEL.parents[1] / "tools" / "train_small_model"))
    import evaluate
    import export

    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokens = tokenizer.encode((MODEL / "heldout.txt").read_text(encoding="utf-8")).ids
    loss = evaluate.loss_torch(export.from_checkpoint(MODEL), tokens, read("config.json")["pad_token_id"])
    assert loss / len(tokens) == pytest.approx(read("eval.json")["heldout"]["loss"], abs=1e-3)
