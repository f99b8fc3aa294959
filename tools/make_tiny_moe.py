#!/usr/bin/env python3
"""Write tiny random-weight MoE checkpoints in Hugging Face layout, each with a byte-level BPE tokenizer.

    make_tiny_moe.py OUT_ROOT [KIND ...]        every kind when none is named

The models have the module structure of the real families and nothing else of them: a few layers of a few
hundred columns, so that a whole engine starts in seconds. Weights are scaled so that activations neither die
out nor grow over the layers, and lm_head so that the greedy token is seldom a near tie.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SEED = 1234
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog. " * 4,
    "experts live in host memory while attention stays on the accelerator. " * 4,
    "def main():\n    print('hello world')\n" * 4,
    "0123456789 " * 8,
] * 8


def write_tokenizer(out: Path, vocab_size: int = 512) -> dict[str, int]:
    """Train and save a byte-level BPE tokenizer; returns vocab_size and the special ids for config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[3],
        additional_special_tokens=SPECIAL_TOKENS[1:2],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


class Weights(dict[str, torch.Tensor]):
    """Named tensors drawn from one seeded generator, so that a kind is the same in every run."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(SEED)

    def normal(self, name: str, *shape: int, std: float, dtype: torch.dtype | None = None) -> None:
        self[name] = (torch.randn(*shape, generator=self.generator) * std).to(dtype or self.dtype)

    def linear(self, name: str, out_features: int, in_features: int, gain: float = 1.0) -> None:
        """[out, in] with variance gain^2 / in."""
        self.normal(name, out_features, in_features, std=gain / in_features**0.5)

    def norm(self, name: str, size: int) -> None:
        self[name] = (1 + 0.1 * torch.randn(size, generator=self.generator)).to(self.dtype)

    def mlp(self, prefix: str, hidden: int, intermediate: int, names: tuple[str, str, str]) -> None:
        """Gated MLP: gate and up [I, H], down [H, I], under the family's own names."""
        gate, up, down = names
        self.linear(f"{prefix}{gate}.weight", intermediate, hidden, gain=1.5)
        self.linear(f"{prefix}{up}.weight", intermediate, hidden, gain=1.5)
        self.linear(f"{prefix}{down}.weight", hidden, intermediate, gain=1.5)

    def embeddings(self, vocab: int, hidden: int) -> None:
        self.linear("model.embed_tokens.weight", vocab, hidden, gain=hidden**0.5)
        self.norm("model.norm.weight", hidden)
        self.linear("lm_head.weight", vocab, hidden, gain=4.0)


PROJ = ("gate_proj", "up_proj", "down_proj")


def finish(out: Path, config: dict[str, Any], weights: Weights, shards: int = 1) -> None:
    """Write config, generation config and the weights, in `shards` files with an index when more than one."""
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id")}
    (out / "generation_config.json").write_text(json.dumps(generation))
    names = list(weights)
    if shards == 1:
        groups = {"model.safetensors": names}
    else:
        size = -(-len(names) // shards)
        groups = {
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i * size : (i + 1) * size]
            for i in range(shards)
        }
        index = {"metadata": {}, "weight_map": {n: file for file, group in groups.items() for n in group}}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, group in groups.items():
        save_file({n: weights[n].contiguous() for n in group}, out / file, metadata={"format": "pt"})


def common_config(hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def fp8_blocks(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and one f32 scale per block x block tile (partial tiles at the ends)."""
    rows, cols = weight.shape
    grid = -(-rows // block), -(-cols // block)
    padded = torch.zeros(grid[0] * block, grid[1] * block)
    padded[:rows, :cols] = weight.float()
    tiles = padded.view(grid[0], block, grid[1], block)
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-8) / 448.0
    codes = (tiles / scale[:, None, :, None]).reshape(padded.shape)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn), scale


def qwen3_moe(
    out: Path, *, fp8: bool = False, mlp_only: tuple[int, ...] = (), shards: int = 1, layers: int = 4
) -> None:
    """Qwen3-MoE: softmax router with renormalised top-k, no shared expert. `mlp_only` layers are dense."""
    hidden, experts, top_k, inter, heads, kv_heads, head_dim = 256, 16, 4, 128, 4, 2, 64
    ids = write_tokenizer(out)
    w = Weights()
    w.embeddings(ids["vocab_size"], hidden)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        w.linear(p + "self_attn.q_proj.weight", heads * head_dim, hidden)
        w.linear(p + "self_attn.k_proj.weight", kv_heads * head_dim, hidden)
        w.linear(p + "self_attn.v_proj.weight", kv_heads * head_dim, hidden)
        w.linear(p + "self_attn.o_proj.weight", hidden, heads * head_dim)
        for n in ("self_attn.q_norm", "self_attn.k_norm"):
            w.norm(f"{p}{n}.weight", head_dim)
        for n in ("input_layernorm", "post_attention_layernorm"):
            w.norm(f"{p}{n}.weight", hidden)
        if layer in mlp_only:
            w.mlp(p + "mlp.", hidden, 4 * hidden, PROJ)
            continue
        w.linear(p + "mlp.gate.weight", experts, hidden, gain=2.0)
        for e in range(experts):
            w.mlp(f"{p}mlp.experts.{e}.", hidden, inter, PROJ)
    config = common_config(hidden, layers, heads, kv_heads) | ids
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": head_dim,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": inter,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(mlp_only),
        "use_sliding_window": False,
        "sliding_window": None,
    }
    if fp8:
        expert_weights = [n for n in w if ".mlp.experts." in n]
        for name in expert_weights:
            w[name], w[name.replace(".weight", ".weight_scale_inv")] = fp8_blocks(w[name])
        dense = sorted(
            {n.removesuffix(".weight") for n in w if n.endswith("proj.weight") and n not in expert_weights}
        )
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [*dense, "lm_head"],
        }
    finish(out, config, w, shards)


def mixtral(out: Path) -> None:
    """Mixtral: softmax router, renormalised top-2, experts under block_sparse_moe with w1, w3, w2."""
    hidden, layers, experts, top_k, inter, heads, kv_heads = 256, 4, 8, 2, 256, 4, 2
    head_dim = hidden // heads
    ids = write_tokenizer(out)
    w = Weights()
    w.embeddings(ids["vocab_size"], hidden)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name, features in {
            "q": heads * head_dim,
            "k": kv_heads * head_dim,
            "v": kv_heads * head_dim,
        }.items():
            w.linear(f"{p}self_attn.{name}_proj.weight", features, hidden)
        w.linear(p + "self_attn.o_proj.weight", hidden, heads * head_dim)
        for n in ("input_layernorm", "post_attention_layernorm"):
            w.norm(f"{p}{n}.weight", hidden)
        w.linear(p + "block_sparse_moe.gate.weight", experts, hidden, gain=2.0)
        for e in range(experts):
            w.mlp(f"{p}block_sparse_moe.experts.{e}.", hidden, inter, ("w1", "w3", "w2"))
    config = common_config(hidden, layers, heads, kv_heads) | ids
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": inter,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "rms_norm_eps": 1e-5,
    }
    finish(out, config, w)


def deepseek_v3(out: Path, *, mtp: int = 0) -> None:
    """DeepSeek-V3: MLA, sigmoid grouped router with bias, a shared expert, a dense first layer, draft layers.

    kv_lora_rank 512 and a rope part of 64 keep the latent at the 576 columns that the MLA kernels know.
    """
    hidden, layers, experts, top_k, inter, heads = 256, 4, 16, 4, 128, 4
    q_rank, kv_rank, nope, rope, v_dim = 128, 512, 128, 64, 128
    ids = write_tokenizer(out)
    w = Weights()
    w.embeddings(ids["vocab_size"], hidden)

    def decoder_layer(layer: int, dense: bool) -> None:
        p = f"model.layers.{layer}."
        w.linear(p + "self_attn.q_a_proj.weight", q_rank, hidden)
        w.norm(p + "self_attn.q_a_layernorm.weight", q_rank)
        w.linear(p + "self_attn.q_b_proj.weight", heads * (nope + rope), q_rank)
        w.linear(p + "self_attn.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden)
        w.norm(p + "self_attn.kv_a_layernorm.weight", kv_rank)
        w.linear(p + "self_attn.kv_b_proj.weight", heads * (nope + v_dim), kv_rank)
        w.linear(p + "self_attn.o_proj.weight", hidden, heads * v_dim)
        for n in ("input_layernorm", "post_attention_layernorm"):
            w.norm(f"{p}{n}.weight", hidden)
        if dense:
            w.mlp(p + "mlp.", hidden, 512, PROJ)
            return
        w.linear(p + "mlp.gate.weight", experts, hidden, gain=2.0)
        w.normal(p + "mlp.gate.e_score_correction_bias", experts, std=0.05, dtype=torch.float32)
        for e in range(experts):
            w.mlp(f"{p}mlp.experts.{e}.", hidden, inter, PROJ)
        w.mlp(p + "mlp.shared_experts.", hidden, inter, PROJ)

    for layer in range(layers):
        decoder_layer(layer, dense=layer == 0)
    for layer in range(layers, layers + mtp):
        p = f"model.layers.{layer}."
        decoder_layer(layer, dense=False)
        for n in ("enorm", "hnorm", "shared_head.norm"):
            w.norm(f"{p}{n}.weight", hidden)
        w.linear(p + "eh_proj.weight", hidden, 2 * hidden)
        w[p + "embed_tokens.weight"] = w["model.embed_tokens.weight"].clone()
        w[p + "shared_head.head.weight"] = w["lm_head.weight"].clone()
    config = common_config(hidden, layers, heads, heads) | ids
    config |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": 512,
        "moe_intermediate_size": inter,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v_dim,
        "num_nextn_predict_layers": mtp,
    }
    finish(out, config, w)


def gpt_oss(out: Path) -> None:
    """gpt-oss unquantised: expert tensors fused and transposed, gate and up interleaved, biases, sinks."""
    hidden, layers, experts, top_k, inter, heads, kv_heads, head_dim = 256, 4, 8, 2, 256, 4, 2, 64
    ids = write_tokenizer(out)
    w = Weights()
    w.embeddings(ids["vocab_size"], hidden)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for name, features in {
            "q": heads * head_dim,
            "k": kv_heads * head_dim,
            "v": kv_heads * head_dim,
        }.items():
            w.linear(f"{p}self_attn.{name}_proj.weight", features, hidden)
            w.normal(f"{p}self_attn.{name}_proj.bias", features, std=0.1)
        w.linear(p + "self_attn.o_proj.weight", hidden, heads * head_dim)
        w.normal(p + "self_attn.o_proj.bias", hidden, std=0.1)
        w.normal(p + "self_attn.sinks", heads, std=0.5)
        for n in ("input_layernorm", "post_attention_layernorm"):
            w.norm(f"{p}{n}.weight", hidden)
        w.linear(p + "mlp.router.weight", experts, hidden, gain=2.0)
        w.normal(p + "mlp.router.bias", experts, std=0.1)
        w.normal(p + "mlp.experts.gate_up_proj", experts, hidden, 2 * inter, std=1.5 / hidden**0.5)
        w.normal(p + "mlp.experts.gate_up_proj_bias", experts, 2 * inter, std=0.1)
        w.normal(p + "mlp.experts.down_proj", experts, inter, hidden, std=1.5 / inter**0.5)
        w.normal(p + "mlp.experts.down_proj_bias", experts, hidden, std=0.1)
    config = common_config(hidden, layers, heads, kv_heads) | ids
    config |= {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": head_dim,
        "intermediate_size": inter,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "experts_per_token": top_k,
        "initial_context_length": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    }
    finish(out, config, w)


KINDS: dict[str, Callable[[Path], None]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_fp8": lambda out: qwen3_moe(out, fp8=True),
    "qwen3_moe_mixed": lambda out: qwen3_moe(out, mlp_only=(0, 2), shards=3),
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v3_mtp": lambda out: deepseek_v3(out, mtp=1),
    "gpt_oss": gpt_oss,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_root", type=Path)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    args = parser.parse_args(argv)
    if unknown := [k for k in args.kinds if k not in KINDS]:
        parser.error(f"unknown kinds {unknown}; known: {', '.join(KINDS)}")
    for kind in args.kinds or KINDS:
        out = args.out_root / kind
        out.mkdir(parents=True, exist_ok=True)
        KINDS[kind](out)
        print(out)


if __name__ == "__main__":
    main()
