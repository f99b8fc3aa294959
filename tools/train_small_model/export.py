"""Hugging Face checkpoint (Qwen3MoeForCausalLM) of a trained model, and back.

The files are what stock vLLM and transformers read: ``config.json``, ``model.safetensors`` in
bfloat16 with one tensor a projection and expert, the tokenizer, ``generation_config.json``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from model import Config, Qwen3Moe
from safetensors.torch import load_file, save_file
from torch import Tensor

# Weights that Qwen3Moe and the checkpoint store under the same name below "model.".
_EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{name}.weight"


def to_checkpoint(model: Qwen3Moe) -> dict[str, Tensor]:
    """bfloat16 tensors by their checkpoint names; the tied ``lm_head`` is not stored."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        value = parameter.detach().cpu().to(torch.bfloat16)
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"model.{name}"] = value.contiguous()
            continue
        layer = int(name.split(".")[1])
        for expert, matrix in enumerate(value):
            if name.endswith("down_proj"):
                parts = {"down_proj": matrix}
            else:
                gate, up = matrix.chunk(2, dim=0)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, tensor in parts.items():
                key = _EXPERT.format(layer=layer, expert=expert, name=part)
                tensors[key] = tensor.contiguous().clone()
    return tensors


def from_checkpoint(folder: Path) -> Qwen3Moe:
    """The model of a folder written by `write`, weights widened to float32."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = Config(**{name: stored[name] for name in Config().to_dict()})
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    model = Qwen3Moe(config)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        if not name.endswith(("gate_up_proj", "down_proj")):
            state[name] = tensors[f"model.{name}"]
            continue
        layer = int(name.split(".")[1])
        parts = ("down_proj",) if name.endswith("down_proj") else ("gate_proj", "up_proj")
        state[name] = torch.stack(
            [
                torch.cat([tensors[_EXPERT.format(layer=layer, expert=e, name=p)] for p in parts])
                for e in range(config.num_experts)
            ]
        )
    model.load_state_dict(state)
    return model.eval()


def hf_config(config: Config, special: dict[str, int]) -> dict[str, Any]:
    """``config.json``; `special` holds the ids of ``eos`` (end of turn) and ``pad``."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **config.to_dict(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": special["eos"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        # Only dense layers would use it, and there are none.
        "intermediate_size": config.moe_intermediate_size * config.num_experts_per_tok,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "pad_token_id": special["pad"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }


def write(model: Qwen3Moe, data: Path, out: Path) -> None:
    """Writes the checkpoint to `out`; `data` holds the tokenizer's files and ``meta.json``."""
    out.mkdir(parents=True, exist_ok=True)
    special = json.loads((data / "meta.json").read_text(encoding="utf-8"))["special"]
    generation = {
        "do_sample": True,
        "eos_token_id": [special["eos"], special["pad"]],
        "pad_token_id": special["pad"],
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
    }
    for name, content in (
        ("config.json", hf_config(model.config, special)),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(data / name, out / name)
    save_file(to_checkpoint(model), out / "model.safetensors", metadata={"format": "pt"})
