"""Types of the native module. Sizes are bytes unless the name says otherwise."""

from collections.abc import Sequence
from typing import Any

__version__: str

class LkError(RuntimeError):
    """The engine refuses or failed; the text names layer, format, sizes and a way out."""

class UnsupportedFormatError(LkError):
    """The weight format, or an option of it, is not one that the engine computes."""

class CudaUnavailableError(LkError):
    """There is no usable NVIDIA driver, device or run-time compiler (NVRTC)."""

class TensorRef:
    """A contiguous tensor in host memory, described by address; `owner` lives as long as the reference.

    dtype is one of 'bf16', 'f16', 'f32', 'u8', 'i8', 'i32', 'i64', 'f8_e4m3', 'f8_e8m0'. A length that does
    not match shape and dtype is refused at construction.
    """

    def __init__(
        self, data_ptr: int, nbytes: int, dtype: str, shape: Sequence[int], owner: object | None = None
    ) -> None: ...

class LazyBuffer:
    """Page-aligned, zero-filled memory that the system commits page by page as it is written."""

    @property
    def data_ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __init__(self, nbytes: int) -> None: ...
    def release(self, offset: int, nbytes: int) -> None:
        """Give the whole pages inside [offset, offset + nbytes) back; they read as zero afterwards."""
    def resident_bytes(self) -> int | None:
        """Bytes that are in memory now; None where the system does not say."""

class Engine:
    """Worker threads and memory of one process. Not usable in a child forked after its construction."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        nodes: Sequence[int] | None = None,
        binding: str = "cpu_core",
        rank: int = 0,
        world: int = 1,
        gpu_node: int | None = None,
        allowed_cpus: Sequence[int] | None = None,
        reserve_cores: int = 0,
        isa: str | None = None,
        kernel: str | None = None,
        compute: str = "exact",
        spin_us: int | None = None,
        power_saving: bool = False,
        step_timeout_s: float = 120.0,
    ) -> None: ...
    def describe(self) -> dict[str, Any]:
        """isa, threads, notes: list[str], nodes: list of {node, workers, cpus: a list per worker}."""
    def create_layer(
        self,
        name: str,
        *,
        format: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        dtype: str,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        linear_beta: float | None = None,
        gated: bool = True,
        interleaved: bool = False,
        w13_bias: bool = False,
        w2_bias: bool = False,
        router_weight_on_input: bool = False,
        group_size: int | None = None,
        max_tokens: int = 0,
    ) -> Layer: ...
    def attach_cuda(
        self,
        device: int,
        *,
        capacity_tokens: int,
        max_hidden_size: int,
        max_top_k: int,
        dtype: str,
        cache_dir: str | None = None,
        nvrtc_dirs: Sequence[str] = (),
        bytes_per_block: int | None = None,
        max_blocks: int | None = None,
    ) -> Handover:
        """Make pinned slots, kernels and leader thread for one GPU, and try them with some rows.

        capacity_tokens: most rows of a send. max_hidden_size, max_top_k, dtype: of the widest layer.
        cache_dir: compiled kernels are kept there. nvrtc_dirs: where to look for libnvrtc besides the
        loader's path. Raises CudaUnavailableError or LkError.
        """
    def inject_fault(self, worker: int, kind: str, seconds: float = 0.0) -> None:
        """Have a worker "panic", or "stall" for some seconds, in the next step, to try what follows."""
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

class Handover:
    """Rows of a GPU stream to the engine and back. Launches never wait and may be captured in CUDA graphs.

    Graphs that hold its launches must not be replayed after it is gone.
    """

    @property
    def capacity_tokens(self) -> int: ...
    def add_layer(self, layer: Layer, expert_map: Sequence[int] | None = None) -> int:
        """Number of a layer for send and receive; expert_map gives each global expert's local id, or -1."""
    def send(
        self,
        layer: int,
        stream: int,
        hidden_states: int,
        topk_ids: int,
        topk_weights: int,
        rows: int,
        is_padding: int = 0,
        num_rows: int = 0,
    ) -> None:
        """Copy rows to the engine. Device addresses: [rows, H] of the layer's dtype, [rows, k] int32 and f32.

        is_padding: [rows] bool; num_rows: one int32, rows from there on are padding; 0 = not given.
        """
    def receive(
        self, layer: int, stream: int, output: int, rows: int, is_padding: int = 0, num_rows: int = 0
    ) -> None:
        """Write the results of the layer's last send to output [rows, H]; zeros for padding or on failure."""
    def check(self) -> None:
        """Raise LkError with the state of the engine at its first failure."""
    def wake(self) -> None: ...
    def close(self) -> None: ...
    def describe(self) -> dict[str, Any]:
        """pinned_bytes, round_trip_us (of the trial, launches included), notes: list[str]."""
    def stats(self) -> dict[str, int]:
        """requests, rows, skipped, naps."""

class Layer:
    """The routed experts of one MoE layer."""

    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int:
        """Bytes of packed experts, padding included."""
    @property
    def bytes_per_node(self) -> list[int]: ...
    def load_expert(self, expert: int, tensors: dict[str, TensorRef]) -> None: ...
    def fill_dummy(self, seed: int) -> None: ...
    def seal(self) -> None: ...
    def reset(self) -> None: ...
    def forward(
        self,
        hidden_states: TensorRef,
        topk_ids: TensorRef,
        topk_weights: TensorRef,
        output: TensorRef,
        expert_map: TensorRef | None = None,
    ) -> None: ...
    def kernels(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, Any]: ...

def read_bandwidth(threads: int | None = None) -> float:
    """Sequential read rate of host memory in GB/s, measured now."""

def cpu_features() -> list[str]:
    """Instruction sets of this CPU that have kernels."""

def compute_peaks(threads: int | None = None) -> dict[str, float]:
    """Arithmetic peaks in GFLOP/s, measured now, by family."""

def memory_limits() -> dict[str, Any]:
    """Bytes: total, available, usable, cgroup_limit (or None), nodes {node: (total, usable)}."""
