"""The engine as a library: MoE layers from arrays in checkpoint form, on numpy or torch memory, no vLLM.

Shapes below: T tokens, k experts per token (top_k), E experts, H hidden_size, I intermediate_size, s = 2 for
gated activations (gate rows, then up rows) and 1 for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lvllm import tensors
from lvllm.native import load as load_native

if TYPE_CHECKING:
    from lvllm import _lk

_FLOATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Engine:
    """Worker threads and NUMA arenas of this process.

    threads: workers, None = all allowed cores. nodes: NUMA nodes to use, None = all allowed. binding:
    "cpu_core" or "numa_node". isa, kernel: force an instruction set or a compute family. compute: "exact", or
    "int8", which quantises activations and changes numerics. Raises LkError for what this machine cannot do.

    A context manager; close() ends the threads. Not usable in a child process that was forked after it was
    made.
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        nodes: Sequence[int] | None = None,
        binding: str = "cpu_core",
        isa: str | None = None,
        kernel: str | None = None,
        compute: str = "exact",
        power_saving: bool = False,
        step_timeout_s: float = 120.0,
        **placement: Any,
    ) -> None:
        self.native: _lk.Engine = load_native().Engine(
            threads=threads,
            nodes=nodes,
            binding=binding,
            isa=isa,
            kernel=kernel,
            compute=compute,
            power_saving=power_saving,
            step_timeout_s=step_timeout_s,
            **placement,
        )

    def describe(self) -> dict[str, Any]:
        """isa, threads, notes, and nodes as a list of {node, workers, cpus}."""
        return self.native.describe()

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return self.native.stats()

    def close(self) -> None:
        """End the worker threads; layers of this engine cannot be used any more. Idempotent."""
        self.native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MoELayer:
    """Routed experts of one layer.

    Either build it whole with from_arrays(), or construct it, load_expert() each expert, and seal() it.

    format: the engine's weight format ("bf16", "f16", "f32", ...). dtype: of hidden_states and output
    ("bf16", "f16", "f32"). activation, limit, alpha, beta, linear_beta, gated, interleaved: as in vLLM's
    MoEActivation; interleaved means that gate and up rows alternate in w13. max_tokens: the largest T that
    forward() is sized for, 0 = grow.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        format: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        dtype: str = "bf16",
        name: str = "moe",
        **options: Any,
    ) -> None:
        self.engine = engine
        self.name = name
        self.dtype = dtype
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.native: _lk.Layer = engine.native.create_layer(
            name,
            format=format,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            top_k=top_k,
            dtype=dtype,
            **options,
        )

    @classmethod
    def from_arrays(
        cls,
        engine: Engine,
        arrays: Mapping[str, Any],
        *,
        top_k: int,
        dtype: str | None = None,
        format: str | None = None,
        weight_dtype: str | None = None,
        intermediate_size: int | None = None,
        hidden_size: int | None = None,
        **options: Any,
    ) -> MoELayer:
        """Build and seal a layer from arrays stacked over experts, named as vLLM names its parameters.

        arrays: w13_weight [E, sI, H], w2_weight [E, H, I], optional w13_bias [E, sI], w2_bias [E, H], and for
        quantised formats w13_weight_scale and the like. weight_dtype: element type of the weights where they
        are raw bits, e.g. "bf16" in uint16. format: defaults to the weights' element type. dtype: of
        activations, defaults to the weights' when that is a float. hidden_size, intermediate_size: needed
        where packed codes hide them.
        """
        w13, w2 = arrays["w13_weight"], arrays["w2_weight"]
        stored = weight_dtype or _FLOATS.get(tensors.dtype_name(w13))
        if (format is None or dtype is None) and stored is None:
            raise TypeError(f"weights of dtype {tensors.dtype_name(w13)}: give format and dtype")
        gated = options.get("gated", True)
        layer = cls(
            engine,
            format=format or str(stored),
            num_experts=int(w13.shape[0]),
            hidden_size=hidden_size or int(w2.shape[1]),
            intermediate_size=intermediate_size or int(w13.shape[1]) // (2 if gated else 1),
            top_k=top_k,
            dtype=dtype or str(stored),
            w13_bias="w13_bias" in arrays,
            w2_bias="w2_bias" in arrays,
            **options,
        )
        for expert in range(layer.num_experts):
            layer.load_expert(expert, {n: a[expert] for n, a in arrays.items()}, weight_dtype=weight_dtype)
        layer.seal()
        return layer

    def load_expert(self, expert: int, arrays: Mapping[str, Any], *, weight_dtype: str | None = None) -> None:
        """Pack one expert: w13_weight [sI, H], w2_weight [H, I], and what the format needs besides.

        Raises ValueError for a wrong shape or dtype, LkError for NaN or infinite weights, with layer and
        expert named.
        """
        refs = {}
        for name, array in arrays.items():
            raw = (
                weight_dtype
                if tensors.dtype_name(array) not in _FLOATS and name.endswith(("_weight", "_bias"))
                else None
            )
            refs[name] = tensors.tensor_ref(array, name, dtype=raw)
        self.native.load_expert(expert, refs)

    def seal(self) -> None:
        """Declare the layer complete. Raises LkError naming experts that were not loaded."""
        self.native.seal()

    def reset(self) -> None:
        """Forget the weights, to load others into the same layer."""
        self.native.reset()

    def forward(
        self,
        hidden_states: Any,
        topk_ids: Any,
        topk_weights: Any,
        *,
        output: Any = None,
        expert_map: Any = None,
    ) -> Any:
        """Sum over the chosen experts, weighted: [T, H] -> [T, H].

        hidden_states: [T, H] of the layer's dtype (bf16 also as uint16 bits). topk_ids: int32 [T, k]; -1
        skips a slot, any other id outside the layer is an error. topk_weights: float32 [T, k]. expert_map:
        int32 [E_global], global to local id, -1 for an expert of another rank. output: written and returned
        if given, else a new array of hidden_states' library. Nothing is copied; other Python threads run
        meanwhile.
        """
        x = tensors.tensor_ref(hidden_states, "hidden_states", dtype=self.dtype)
        if output is None:
            output = tensors.empty_like(hidden_states)
        self.native.forward(
            x,
            tensors.tensor_ref(topk_ids, "topk_ids", dtype="i32"),
            tensors.tensor_ref(topk_weights, "topk_weights", dtype="f32"),
            tensors.tensor_ref(output, "output", dtype=self.dtype),
            None if expert_map is None else tensors.tensor_ref(expert_map, "expert_map", dtype="i32"),
        )
        return output

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, scales and padding included."""
        return self.native.bytes

    @property
    def nbytes_per_node(self) -> list[int]:
        return list(self.native.bytes_per_node)

    def bytes_of_step(self, topk_ids: Any) -> int:
        """Packed bytes that a forward with these ids reads once: those of its distinct experts."""
        chosen = {int(e) for row in topk_ids.tolist() for e in row if e >= 0}
        return math.ceil(self.nbytes * len(chosen) / self.num_experts)

    def kernels(self) -> dict[str, Any]:
        """The kernel chosen per number of rows."""
        return self.native.kernels()

    def stats(self) -> dict[str, Any]:
        """Counters of this layer."""
        return self.native.stats()
