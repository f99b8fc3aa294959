"""Checkpoint headers: whole, cut, missing, mistyped. Files are written by hand, header and zeros."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from lvllm import checkpoint

HIDDEN, INTER, EXPERTS = 8, 4, 4


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    sizes = {"BF16": 2, "F32": 4, "I32": 4, "U8": 1, "F8_E4M3": 1}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        count = sizes[dtype]
        for n in shape:
            count *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def experts(layers: int = 2, dtype: str = "BF16") -> dict[str, tuple[str, list[int]]]:
    tensors: dict[str, tuple[str, list[int]]] = {}
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp"
        tensors[f"{block}.gate.weight"] = ("BF16", [EXPERTS, HIDDEN])
        for e in range(EXPERTS):
            for name, shape in {
                "gate_proj": [INTER, HIDDEN],
                "up_proj": [INTER, HIDDEN],
                "down_proj": [HIDDEN, INTER],
            }.items():
                tensors[f"{block}.experts.{e}.{name}.weight"] = (dtype, shape)
    return tensors


def check(folder: Path, quantized: bool = False) -> dict[str, checkpoint.ExpertLayer]:
    return checkpoint.check_experts(checkpoint.read_folder(folder), num_experts=EXPERTS, quantized=quantized)


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", experts())
    layers = check(tmp_path)
    assert [(layer.index, layer.num_experts) for layer in layers.values()] == [(0, EXPERTS), (1, EXPERTS)]
    one = layers["model.layers.0.mlp.experts"]
    assert one.nbytes == EXPERTS * 3 * HIDDEN * INTER * 2
    assert one.host_bytes(4) == 2 * one.nbytes


def test_fused_experts(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.router.weight": ("BF16", [EXPERTS, HIDDEN]),
        "model.layers.0.mlp.experts.gate_up_proj": ("BF16", [EXPERTS, HIDDEN, 2 * INTER]),
        "model.layers.0.mlp.experts.down_proj": ("BF16", [EXPERTS, INTER, HIDDEN]),
    }
    write(tmp_path / "model.safetensors", tensors)
    assert check(tmp_path)["model.layers.0.mlp.experts"].num_experts == EXPERTS
    tensors["model.layers.0.mlp.experts.down_proj"] = ("BF16", [EXPERTS - 1, INTER, HIDDEN])
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(checkpoint.CheckpointError, match=r"down_proj holds 3 experts, the model has 4"):
        check(tmp_path)


@pytest.mark.parametrize("lost", ["2.up_proj", "3.down_proj"])
def test_a_missing_tensor_is_named(tmp_path: Path, lost: str) -> None:
    tensors = experts()
    name = f"model.layers.1.mlp.experts.{lost}.weight"
    del tensors[name]
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(f"missing tensors: {name}")):
        check(tmp_path)


def test_a_layer_without_any_expert_is_named(tmp_path: Path) -> None:
    tensors = {n: t for n, t in experts().items() if "layers.1.mlp.experts" not in n}
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"model\.layers\.1\.mlp has a router but no experts"
    ):
        check(tmp_path)


@pytest.mark.parametrize("keep", [4, 200, -1])
def test_a_cut_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    write(path, experts())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.safetensors.*Download it again"):
        check(tmp_path)


def test_one_expert_of_another_dtype_or_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    for odd, message in ((("F32", [INTER, HIDDEN]), "dtype F32"), (("BF16", [INTER, HIDDEN + 8]), "shape")):
        write(tmp_path / "model.safetensors", experts() | {name: odd})
        with pytest.raises(checkpoint.CheckpointError, match=f"{name} has {message}"):
            check(tmp_path)


def test_integer_weights_need_a_quantization_config(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", experts(dtype="U8"))
    with pytest.raises(
        checkpoint.CheckpointError, match=r"has dtype U8, but config\.json names no quantization"
    ):
        check(tmp_path)
    assert len(check(tmp_path, quantized=True)) == 2


def test_the_index_is_held_against_the_files(tmp_path: Path) -> None:
    tensors = experts()
    names = list(tensors)
    half = len(names) // 2
    parts = {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }
    for file, group in parts.items():
        write(tmp_path / file, {n: tensors[n] for n in group})
    index = {"weight_map": {n: file for file, group in parts.items() for n in group}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert len(check(tmp_path)) == 2
    path.write_text(
        json.dumps({"weight_map": index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(
        checkpoint.CheckpointError, match=r"1 tensors are named by .* not in their files: ghost"
    ):
        check(tmp_path)
    path.write_text(json.dumps(index))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"1 of 2 files .* missing: model-00002"):
        check(tmp_path)
