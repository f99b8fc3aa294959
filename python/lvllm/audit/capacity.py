"""Memory arithmetic: KV pool, tokens, concurrency, least tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from lvllm.audit.model import Model

SMALL_CARD_GIB = 24
_KV_BYTES = {"auto": 2.0, "float16": 2.0, "bfloat16": 2.0}


def overhead_gib(card_gib: float, fraction: float = 1.0) -> float:
    """Activations, graphs and communication buffers of one GPU; an engine with a small share is run small."""
    whole = 2.0 if card_gib <= SMALL_CARD_GIB else 4.0
    return whole * min(1.0, 2 * fraction)


def kv_bytes(kv_cache_dtype: str | None) -> float:
    """Bytes of one cached value."""
    name = (kv_cache_dtype or "auto").lower()
    if name in _KV_BYTES:
        return _KV_BYTES[name]
    return 0.5 if "4" in name.partition("_")[0] else 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """One GPU of a unit."""

    weights_gib: float
    pool_gib: float
    bytes_per_token: float | None

    @property
    def tokens(self) -> float | None:
        if self.bytes_per_token is None or self.pool_gib <= 0:
            return None
        return self.pool_gib * 2**30 / self.bytes_per_token

    def sequences(self, length: float) -> float | None:
        tokens = self.tokens
        return None if tokens is None or length <= 0 else tokens / length


def estimate(
    model: Model, card_gib: float, fraction: float, *, tp: int = 1, pp: int = 1, kv: str | None = None,
    bytes_per_param: float | None = None, host_experts: bool = False,
) -> Estimate | None:  # fmt: skip
    """KV pool = GiB x fraction - weights/(TPxPP) - overhead; None if the size is unknown.

    `host_experts`: the routed experts stay in host memory (hybrid).
    """
    weights = model.weights_gib
    if weights is None:
        return None
    if bytes_per_param is not None:
        weights *= bytes_per_param / model.bytes_per_param
    if host_experts and model.expert_gib is not None:
        weights -= model.expert_gib
    share = weights / max(1, tp * pp)
    per_token = model.kv_bytes_per_token(kv_bytes(kv))
    if per_token is not None:
        # A latent cache is replicated over TP ranks; heads are divided, but each rank holds at least one.
        ways = 1 if model.kv_lora is not None else min(tp, model.kv_heads or tp)
        per_token = per_token / max(1, ways) / max(1, pp)
    return Estimate(share, card_gib * fraction - share - overhead_gib(card_gib, fraction), per_token)


def least_tp(model: Model, card_gib: float, fraction: float, *, pp: int = 1, limit: int = 64) -> int | None:
    """The least power of two that divides the heads and leaves a KV pool; None if none does."""
    tp = 1
    while tp <= limit:
        found = estimate(model, card_gib, fraction, tp=tp, pp=pp)
        divides = model.heads is None or model.heads % tp == 0
        if found is not None and found.pool_gib > 0 and divides:
            return tp
        tp *= 2
    return None
