"""What cannot be served is refused in one clear sentence, before weights are read."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lvllm
import pytest
from harness import ON, Outcome, environment, run_engine

Copy = Callable[[str], Path]
READING = "Loading safetensors checkpoint shards"


def refused(outcome: Outcome, *words: str) -> None:
    assert outcome.code != 0
    assert outcome.result is None
    missing = [w for w in words if w not in outcome.text]
    assert not missing, f"{missing} not in:\n{outcome.text[-3000:]}"


def refused_early(outcome: Outcome, *words: str) -> None:
    refused(outcome, *words)
    assert READING not in outcome.text


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


def test_a_missing_tensor(copy_of: Copy, tmp_path: Path) -> None:
    model = copy_of("qwen3_moe")
    edit_header(model / "model.safetensors", lambda h: h.update({"spare": h.pop(EXPERT)}))
    refused_early(
        run_engine(tmp_path, model, **ON), f"missing tensors: {EXPERT}", "Download the checkpoint again"
    )


def test_a_truncated_shard(copy_of: Copy, tmp_path: Path) -> None:
    model = copy_of("qwen3_moe_mixed")
    shard = model / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    refused_early(run_engine(tmp_path, model, **ON), f"{shard.name} is", "cut short")


def test_a_wrong_dtype(copy_of: Copy, tmp_path: Path) -> None:
    model = copy_of("qwen3_moe")
    edit_header(model / "model.safetensors", lambda h: h[EXPERT].update(dtype="I16"))
    refused_early(run_engine(tmp_path, model, **ON), f"{EXPERT} has dtype I16", "BF16")


def test_a_nan_weight_names_layer_and_expert(copy_of: Copy, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = copy_of("qwen3_moe")
    tensors = load_file(model / "model.safetensors")
    tensors[EXPERT][3, 7] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(run_engine(tmp_path, model, **ON), "model.layers.2.mlp.experts", "expert 5")


def test_fp8_experts_have_no_decoder_yet(models: Copy, tmp_path: Path) -> None:
    """Refused by name with a way out, never silently something else."""
    outcome = run_engine(tmp_path, models("qwen3_moe_fp8"), engine={"dtype": "bfloat16"}, **ON)
    refused(outcome, "model.layers.0.mlp.experts", "Fp8MoEMethod", "LVLLM_GPU_RESIDENT_MOE_LAYERS")


CONFIGS: list[tuple[dict[str, Any], dict[str, str], tuple[str, ...]]] = [
    ({}, {"LK_TREADS": "2"}, ("LK_TREADS is not a setting of lvllm; did you mean LK_THREADS?",)),
    ({}, {"LK_THREADS": "0"}, ("LK_THREADS='0' is not allowed", "a whole number from 1")),
    ({}, {"LVLLM_GPU_RESIDENT_MOE_LAYERS": "0-9"}, ("layers 4-9 do not exist", "4 main layers (0-3)")),
    ({}, {"LVLLM_COMPUTE": "int8"}, ("LVLLM_COMPUTE=int8", "not part of this build; use exact")),
    ({}, {"LVLLM_HOST_GIB": "0.001"}, ("of host memory available (LVLLM_HOST_GIB)", "too little")),
    (
        {"additional_config": {"lvllm": {"thread": 2}}},
        {},
        ("lvllm.thread is not a setting", "did you mean threads?"),
    ),
    ({"enable_lora": True}, {}, ("--enable-lora", "merge the adapter")),
    ({"load_format": "sharded_state"}, {}, ("--load-format sharded_state", "use the original checkpoint")),
    ({"cpu_offload_gb": 1}, {}, ("--cpu-offload-gb without --cpu-offload-params", "name the parameters")),
    ({"cpu_offload_gb": 1, "cpu_offload_params": {"experts"}}, {}, ("--cpu-offload-params names experts",)),
    ({"offload_group_size": 2}, {}, ("--offload-group-size", "drop it")),
    ({"moe_backend": "deep_gemm_mega_moe"}, {}, ("deep_gemm_mega_moe", "use --moe-backend auto")),
]


def test_configurations(models: Copy) -> None:
    """Each is refused while the configuration is built, in a sentence that names the option and a way out."""
    model = str(models("qwen3_moe"))
    accepted = {"engine": {"model": model}, "environ": {}}
    jobs = [accepted, *({"engine": {"model": model} | e, "environ": v} for e, v, _ in CONFIGS)]
    script = Path(__file__).parent / "check_configs.py"
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(jobs, default=sorted)],
        env=environment(ON),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *errors = json.loads(done.stdout.strip().splitlines()[-1])
    assert first is None
    for (engine, environ, words), error in zip(CONFIGS, errors, strict=True):
        assert error is not None, (engine, environ)
        assert all(word in error for word in words), f"{words} not in {error!r}"


def overlay(tmp_path: Path) -> Path:
    """The package under test, copied in front of the installed one."""
    root = tmp_path / "overlay"
    shutil.copytree(Path(lvllm.__file__).parent, root / "lvllm", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def python_path(root: Path) -> str:
    return ":".join([str(root), *filter(None, sys.path)])


def test_a_broken_native_module_never_becomes_plain_vllm(models: Copy, tmp_path: Path) -> None:
    root = overlay(tmp_path)
    for module in (root / "lvllm").glob("_lk*.so"):
        module.write_bytes(b"")
    path = python_path(root)
    words = ("the native module lvllm._lk cannot be loaded", "file too short")
    refused_early(run_engine(tmp_path, models("qwen3_moe"), PYTHONPATH=path, **ON), *words)
    assert run_engine(tmp_path, models("qwen3_moe"), PYTHONPATH=path).code == 0


def fake_distribution(root: Path, name: str, version: str, record: str = "") -> None:
    folder = root / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text(record)


@pytest.mark.parametrize(
    ("name", "version", "record", "words"),
    [
        ("lvllm", "2.0.1", "", ("lvllm 2.0.1", "replaces vLLM itself", "pip uninstall -y lvllm vllm")),
        ("other-vllm", "1.0", "vllm/__init__.py,,\n", ("other-vllm", "replaces vLLM itself")),
        ("vllm", "0.26.0+cpu", "", ("vLLM 0.26.0+cpu is outside the range", "0.30 to 0.33")),
        ("vllm", "0.34.1+cpu", "", ("vLLM 0.34.1+cpu is outside the range", "0.30 to 0.33")),
    ],
)
def test_other_distributions(
    name: str, version: str, record: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    fake_distribution(tmp_path, name, version, record)
    code = "import lvllm.plugin as p, sys\ntry: p.register()\nfinally: print('vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(ON | {"PYTHONPATH": python_path(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout.strip() == "False", "refused before vLLM was imported"
    assert all(word in done.stderr for word in words), done.stderr
