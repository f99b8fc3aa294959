"""One line now and then about loading: layers, bytes, rate, remaining time, bytes per node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lvllm.host import gb

if TYPE_CHECKING:
    from lvllm import _lk

_FIRST_S, _EVERY_S = 5.0, 10.0


class LoadProgress:
    """Counts what all host layers of one worker have taken in. Silent for loads of a few seconds."""

    def __init__(self) -> None:
        self.layers: dict[str, int] = {}
        self.done: set[str] = set()
        self.loaded_bytes = 0
        self.started: float | None = None
        self._next = 0.0
        self._per_node: dict[str, list[int]] = {}

    def expect(self, layer_name: str, expert_bytes: int) -> None:
        """Announce a layer with the bytes of all its experts; must precede its first weight."""
        self.layers[layer_name] = expert_bytes

    def add(self, layer_name: str, count: int, engine_layer: _lk.Layer) -> None:
        """Count `count` bytes of one expert that the engine has just packed."""
        now = time.monotonic()
        if self.started is None:
            self.started = now
            self._next = now + _FIRST_S
        self.loaded_bytes += count
        if now >= self._next:
            self._next = now + _EVERY_S
            self._per_node[layer_name] = list(engine_layer.bytes_per_node)
            self._log()

    def layer_done(self, layer_name: str, engine_layer: _lk.Layer) -> None:
        self.done.add(layer_name)
        self._per_node[layer_name] = list(engine_layer.bytes_per_node)

    def bytes_per_node(self) -> list[int]:
        """Bytes of the arena per node, summed over layers; index is the engine's node order."""
        width = max((len(v) for v in self._per_node.values()), default=0)
        return [sum(v[i] for v in self._per_node.values() if i < len(v)) for i in range(width)]

    def line(self) -> str:
        total = sum(self.layers.values())
        elapsed = max(1e-3, time.monotonic() - (self.started or time.monotonic()))
        rate = self.loaded_bytes / elapsed
        left = max(0, total - self.loaded_bytes)
        eta = f"{left / rate:.0f} s left" if rate > 0 else "no data yet"
        whole = total / max(1, len(self.layers))
        layer = min(len(self.layers), int(self.loaded_bytes / whole)) if whole else 0
        nodes = ", ".join(f"node {i}: {gb(n)}" for i, n in enumerate(self.bytes_per_node()))
        return (
            f"experts: layer {layer}/{len(self.layers)}, {gb(self.loaded_bytes)} of {gb(total)}, "
            f"{rate / 1e9:.2f} GB/s, {eta}" + (f" ({nodes})" if nodes else "")
        )

    def _log(self) -> None:
        from vllm.logger import init_logger

        init_logger("vllm.lvllm").info("%s", self.line())
