"""The names table and the data files: complete, versioned, rebuilt from a vLLM tree without importing it."""
# ruff: noqa: E501 - small trees as single lines

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from conftest import ROOT, Audit, write
from lvllm.audit import names, pipeline
from lvllm.audit.hardware import find
from lvllm.audit.model import from_name

DATA = resources.files("lvllm.audit") / "data"

TREE = {
    "vllm/_version.py": "__version__ = version = '9.8.7'\n",
    "vllm/config/model.py": "class ModelConfig:\n    model: str = 'a/b'\n    seed: int = 0\n"
    "    limit: int | None = None\n    kinds: list[str] = field(default_factory=list)\n    rate: float = Field(default=0.5, gt=0)\n",
    "vllm/engine/arg_utils.py": "raise SystemExit('imported')\nclass EngineArgs:\n    model: str = ModelConfig.model\n"
    "    seed: int = ModelConfig.seed\n    limit: int | None = ModelConfig.limit\n    kinds: list[str] = ModelConfig.kinds\n"
    "    rate: float = ModelConfig.rate\n    _private: int = 1\n    flag: bool = False\n"
    + "".join(f"    extra_{i}: int = {i}\n" for i in range(50))
    + "    @staticmethod\n    def add_cli_args(parser):\n        parser.add_argument('--model', '-m')\n        parser.add_argument('--seed')\n",
    "vllm/entrypoints/launchers/cli_args.py": "class BaseFrontendArgs:\n    api_key: list[str] | None = None\n"
    "class FrontendArgs(BaseFrontendArgs):\n    port: int = 8000\ndef make(p):\n    p.add_argument('--headless')\n",
    "vllm/envs.py": "environment_variables: dict = {'VLLM_B': 1, 'VLLM_A': 2, 'OTHER': 3}\n",
}


def rebuild(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "make_audit_names.py"), str(tree), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_table_is_rebuilt_by_parsing(tmp_path: Path) -> None:
    target = tmp_path / "names.json"
    done = rebuild(write(tmp_path / "tree", TREE), "--output", str(target))
    assert done.returncode == 0, done.stderr
    made = json.loads(target.read_text("utf-8"))
    fields = {k: v for k, v in made["engine_fields"].items() if not k.startswith("extra")}
    assert fields == {"model": "a/b", "seed": 0, "limit": None, "kinds": "?", "rate": 0.5, "flag": False}
    assert made["engine_options"] == ["--model", "--seed"]
    assert made["serve_options"] == ["--api-key", "--headless", "--port"]
    assert made["environment"] == ["VLLM_A", "VLLM_B"]
    assert made["vllm"] == "9.8.7"
    assert "against 0.33.0" in done.stdout


def test_a_changed_layout_is_told(tmp_path: Path) -> None:
    tree = write(tmp_path, {**TREE, "vllm/envs.py": "variables = {}\n"})
    done = rebuild(tree, "--output", str(tmp_path / "x.json"))
    assert done.returncode != 0
    assert "adapt this script" in done.stderr
    assert rebuild(tmp_path / "nothing").returncode != 0


def test_the_table_in_use() -> None:
    table = names.names()
    assert table["vllm"] == names.reference() == "0.33.0"
    assert len(table["engine_fields"]) > 200
    assert (
        names.fields()["gpu_memory_utilization"]
        == names.table("options")["defaults"]["gpu_memory_utilization"]
    )
    removed = set(names.removed("options")) & set(table["engine_fields"])
    assert removed == set(), "a removed name came back"
    assert not set(names.removed("environment")) & set(table["environment"])


def test_every_data_file_has_a_version_line() -> None:
    files = [f for folder in (DATA, DATA / "rules") for f in folder.iterdir() if f.name.endswith(".toml")]
    assert len(files) >= 18
    for file in files:
        assert tomllib.loads(file.read_text("utf-8"))["version"] == names.reference(), file.name


def test_owners_of_removed_names_are_items() -> None:
    from lvllm.audit.checks.rules import items

    for section in ("options", "environment", "compilation"):
        for name, row in names.removed(section).items():
            assert row.get("owner") is None or row["owner"] in items(), name


def test_a_changed_default_needs_no_code(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"s.sh": "vllm serve Qwen/Qwen3-14B --max-model-len 8192\n"}
    before = audit(files, "--gpu", "A100-40:1", format="md").text
    monkeypatch.setitem(names.table("options")["defaults"], "gpu_memory_utilization", 0.5)
    after = audit(files, "--gpu", "A100-40:1")
    assert "do not fit" not in before
    assert "C1.does_not_fit" in after.rules


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B", ("Qwen3", 8.19, False, None, 36)),
        ("meta-llama/Llama-3.3-70B-Instruct", ("Llama 3.1+", 70.6, False, None, 80)),
        ("Qwen/Qwen3-30B-A3B", ("Qwen3 MoE", 30.5, True, None, 48)),
        ("deepseek-ai/DeepSeek-R1", ("DeepSeek-V3 / R1", 671, True, "fp8", 61)),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", ("Qwen2.5", 7.62, False, None, 28)),
        ("mistralai/Mixtral-8x7B-v0.1", ("Mixtral", 46.7, True, None, 32)),
        ("openai/gpt-oss-120b", ("gpt-oss", 120, True, "mxfp4", 36)),
        ("x/Qwen2.5-7B-Instruct-GPTQ-Int8", ("Qwen2.5", 7.62, False, "gptq8", 28)),
        ("someone/Thing-12B-A2B-NVFP4", ("", 12.0, True, "nvfp4", None)),
        ("/models/mine", ("", None, None, None, None)),
    ],
)
def test_model_names(name: str, expected: tuple[object, ...]) -> None:
    model = from_name(name)
    assert (model.family, model.params_b, model.moe, model.quantized, model.layers) == expected


@pytest.mark.parametrize(
    ("name", "sm", "gib"),
    [("A100-80", 80, 80), ("a100-40", 80, 40), ("NVIDIA-H100-80GB-HBM3", 90, 80), ("RTX 4090", 89, 24), ("A10G", 86, 24),
     ("Tesla T4", 75, 16), ("H20", 90, 96), ("H200", 90, 141), ("GB200", 100, 180), ("RTX PRO 6000", 120, 96),
     ("RTX 6000 Ada", 89, 48), ("5060 Ti", 120, 16), ("L40S", 89, 48), ("GB10", 121, 128)],
)  # fmt: skip
def test_gpu_names(name: str, sm: int, gib: float) -> None:
    gpu = find(name)
    assert gpu is not None
    assert (gpu.sm, gpu.gib) == (sm, gib)


def test_own_repository_is_fast() -> None:
    """Under two seconds of this process's own time."""
    started = time.process_time()
    pipeline.run(pipeline.Request(ROOT))
    assert time.process_time() - started < 2
