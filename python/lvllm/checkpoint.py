"""What a safetensors checkpoint says about its experts, from headers alone: no weight is read."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EXPERT = re.compile(
    r"^(?P<layer>.*?\blayers\.(?P<index>\d+)\.(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<part>.+)$"
)
_FUSED = re.compile(
    r"^(?P<layer>.*?\blayers\.(?P<index>\d+)\.(?:.*\.)?experts)\.(?P<part>[a-z]\w*(?:\.\w+)*)$"
)
_ROUTER = re.compile(r"^(?P<block>.*\blayers\.\d+\..*?)\.(?:gate|router|router\.proj|gate\.wg)\.weight$")
_HEADER_LIMIT = 1 << 30
_FLOATS = {"F32", "F16", "BF16"}
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class CheckpointError(ValueError):
    """The checkpoint cannot be loaded as it is; the text names the file or tensors, and a way out."""


@dataclass(frozen=True)
class Tensor:
    """One tensor as a header describes it. nbytes is its length in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class ExpertLayer:
    """Expert tensors of one layer. parts: tensor name after the expert's number -> expert -> tensor."""

    name: str
    index: int
    parts: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    fused: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        per_expert = sum(t.nbytes for experts in self.parts.values() for t in experts.values())
        return per_expert + sum(t.nbytes for t in self.fused.values())

    def host_bytes(self, item_bytes: int) -> int:
        """Bytes in host memory: floats take the model's `item_bytes`, others stay as stored."""
        tensors = [t for experts in self.parts.values() for t in experts.values()] + list(self.fused.values())
        return sum(
            t.nbytes // _ITEM_BYTES[t.dtype] * item_bytes if t.dtype in _FLOATS else t.nbytes for t in tensors
        )

    @property
    def num_experts(self) -> int:
        """Experts that the tensors name, or the leading dimension of the fused ones."""
        named = [max(experts) + 1 for experts in self.parts.values()]
        return max(named + [t.shape[0] for t in self.fused.values() if t.shape], default=0)


def read_header(path: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file. CheckpointError for a malformed header or a file cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > min(_HEADER_LIMIT, size):
            raise CheckpointError(
                f"{path.name} is not a whole safetensors file ({size} bytes). Download it again; a file of "
                "about 130 bytes is a pointer that git-lfs has not replaced."
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(
                f"{path.name}: unreadable safetensors header ({error}). Download it again."
            ) from None
    tensors = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        end = max(end, stop)
        tensors[name] = Tensor(name, path.name, entry["dtype"], shape, stop - begin)
        count = 1
        for n in shape:
            count *= n
        if (item := _ITEM_BYTES.get(entry["dtype"])) and count * item != stop - begin:
            raise CheckpointError(
                f"{path.name}: {name} is declared {entry['dtype']} {list(shape)}, {count * item} bytes, but "
                f"occupies {stop - begin} bytes. Download it again."
            )
    if size != 8 + length + end:
        reason = (
            "the download was cut short" if size < 8 + length + end else "there are foreign bytes at its end"
        )
        raise CheckpointError(
            f"{path.name} is {size} bytes long, but its header describes {8 + length + end}: {reason}. "
            "Download it again."
        )
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder by name; the index is checked against the files."""
    index_path = folder / "model.safetensors.index.json"
    mapped: dict[str, str] = {}
    if index_path.is_file():
        try:
            mapped = json.loads(index_path.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{index_path.name}: unreadable ({error}). Download it again.") from None
        files = [folder / name for name in sorted(set(mapped.values()))]
        absent = [f.name for f in files if not f.is_file()]
        if absent:
            raise CheckpointError(
                f"{len(absent)} of {len(files)} files named by {index_path.name} are missing: "
                f"{', '.join(absent[:4])}{' ...' if len(absent) > 4 else ''}. Finish the download."
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in read_header(path).items():
            if name in tensors and not mapped:
                raise CheckpointError(
                    f"{name} is in both {tensors[name].file} and {path.name}. Remove the file that is not "
                    "part of this checkpoint, or add an index."
                )
            if not mapped or mapped.get(name) == path.name:
                tensors[name] = tensor
    if lost := [n for n in mapped if n not in tensors]:
        raise CheckpointError(
            f"{len(lost)} tensors are named by {index_path.name} but are not in their files: "
            f"{', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''}. Download the checkpoint again."
        )
    return tensors


def expert_layers(tensors: Iterable[Tensor]) -> dict[str, ExpertLayer]:
    """Expert tensors grouped by layer prefix, e.g. `model.layers.3.mlp.experts`."""
    layers: dict[str, ExpertLayer] = {}
    for tensor in tensors:
        match = _EXPERT.match(tensor.name)
        if match:
            layer = layers.setdefault(match["layer"], ExpertLayer(match["layer"], int(match["index"])))
            layer.parts[match["part"]][int(match["expert"])] = tensor
            continue
        match = _FUSED.match(tensor.name)
        if match and len(tensor.shape) >= 2:
            layer = layers.setdefault(match["layer"], ExpertLayer(match["layer"], int(match["index"])))
            layer.fused[match["part"]] = tensor
    return layers


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def check_experts(tensors: dict[str, Tensor], *, num_experts: int, quantized: bool) -> dict[str, ExpertLayer]:
    """Every layer's experts are all there, alike in dtype and shape. Returns the layers.

    num_experts: routed experts a layer should have by the model's config, 0 when it does not say.
    Raises CheckpointError naming tensors.
    """
    layers = expert_layers(tensors.values())
    for layer in layers.values():
        _check_layer(layer, num_experts, quantized)
    blocks = {name.rsplit(".", 1)[0] for name in layers}
    headless = []
    for name in tensors:
        match = _ROUTER.match(name)
        if match and layers and match["block"] not in blocks and f"{match['block']}.experts" not in layers:
            headless.append(match["block"])
    like = Counter(b.rsplit(".", 1)[-1] for b in blocks)
    headless = [b for b in headless if like[b.rsplit(".", 1)[-1]]]
    if headless:
        raise CheckpointError(
            f"missing tensors: {_list(sorted(headless))} has a router but no experts in this checkpoint. "
            "Download the checkpoint again."
        )
    return layers


def _check_layer(layer: ExpertLayer, num_experts: int, quantized: bool) -> None:
    count = max(layer.num_experts, num_experts) if layer.parts else layer.num_experts
    for part, experts in layer.parts.items():
        if lost := [f"{layer.name}.{e}.{part}" for e in range(count) if e not in experts]:
            raise CheckpointError(f"missing tensors: {_list(lost)}. Download the checkpoint again.")
        for what in ("dtype", "shape"):
            kinds = Counter(getattr(t, what) for t in experts.values())
            if len(kinds) > 1:
                usual = kinds.most_common(1)[0][0]
                odd = next(t for t in experts.values() if getattr(t, what) != usual)
                raise CheckpointError(
                    f"{odd.name} has {what} {getattr(odd, what)} where the other experts of its layer have "
                    f"{usual}. Download the checkpoint again, or convert the tensor."
                )
        sample = next(iter(experts.values()))
        if not quantized and part.endswith("weight") and sample.dtype not in _FLOATS:
            raise CheckpointError(
                f"{sample.name} has dtype {sample.dtype}, but config.json names no quantization that would "
                "explain it; allowed without one: BF16, F16, F32. Restore quantization_config, or convert "
                "the checkpoint."
            )
    for tensor in layer.fused.values():
        if num_experts and tensor.shape[0] < num_experts and len(tensor.shape) == 3:
            raise CheckpointError(
                f"{tensor.name} holds {tensor.shape[0]} experts, the model has {num_experts}. "
                "Download the checkpoint again."
            )
