"""Qwen3-MoE in torch, for training: the mathematics of Hugging Face's Qwen3MoeForCausalLM.

Every layer is sparse. All experts are computed for every token in two wide products and the
routing weights, zero for experts that were not chosen, are applied between them: at these
widths that is faster on a GPU than gathering tokens by expert, and its result is the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model; all widths are multiples of 128 except the head."""

    vocab_size: int = 2304
    hidden_size: int = 256
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * h).to(x.dtype)


def rope_tables(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each ``[max_position_embeddings, head_dim]`` float32, halves repeated."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    position = torch.arange(config.max_position_embeddings, device=device, dtype=torch.float32)
    angle = torch.outer(position, frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with an RMSNorm on each query and key head before RoPE."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, length, count, self.head_dim)

        q = _rotate(self.q_norm(heads(self.q_proj(x), self.heads)).transpose(1, 2), cos, sin)
        k = _rotate(self.k_norm(heads(self.k_proj(x), self.kv_heads)).transpose(1, 2), cos, sin)
        v = heads(self.v_proj(x), self.kv_heads).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class SparseMoe(nn.Module):
    """Router (softmax, top k, renormalised) and SwiGLU experts.

    ``gate_up_proj`` is ``[E, 2I, H]`` (gate rows first), ``down_proj`` ``[E, H, I]``.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.experts = config.num_experts_per_tok, config.num_experts
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = nn.Linear(hidden, self.experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(self.experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.experts, hidden, inner))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[N, H]`` and the load-balancing loss of this layer (1 when balanced)."""
        probability = self.gate(x).float().softmax(dim=-1)
        top, index = probability.topk(self.top_k, dim=-1)
        top = top / top.sum(dim=-1, keepdim=True)
        weight = torch.zeros_like(probability).scatter(1, index, top)
        chosen = (weight.detach() > 0).float().mean(dim=0) / self.top_k
        balance = self.experts * (chosen * probability.mean(dim=0)).sum()

        hidden = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(1, (self.experts, -1))
        gate, up = hidden.chunk(2, dim=-1)
        hidden = F.silu(gate) * up * weight.to(x.dtype).unsqueeze(-1)
        return F.linear(hidden.flatten(1), self.down_proj.transpose(0, 1).flatten(1)), balance


class Block(nn.Module):
    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMoe(config)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attended, self.dropout, self.training)
        mixed, balance = self.mlp(self.post_attention_layernorm(x).flatten(0, 1))
        return x + F.dropout(mixed.view_as(x), self.dropout, self.training), balance


class Qwen3Moe(nn.Module):
    """The language model; the output matrix is the embedding (tied)."""

    def __init__(self, config: Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope_tables(config, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights of deviation 0.02; those that write the residual stream are scaled
        by ``1 / sqrt(2 * layers)``."""
        scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02 * (scale if name.endswith(("o_proj.weight", "down_proj")) else 1.0)
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, T, V]`` of int64 `tokens` ``[B, T]``, and the mean balancing loss."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed_tokens(tokens)
        balance = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, layer_balance = layer(x, cos, sin)
            balance = balance + layer_balance
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return logits, balance / len(self.layers)
