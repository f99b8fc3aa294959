"""Exit codes, arguments, output, languages, schema, determinism."""
# ruff: noqa: E501 - small projects as single lines

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from conftest import ROOT, Audit, write
from lvllm.audit.cli import main

SAMPLES = Path(__file__).parent / "samples"
ALL = sorted(p.name for p in SAMPLES.iterdir() if p.is_dir())
SCHEMA = json.loads((resources.files("lvllm.audit") / "data" / "report.schema.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ALL)
def test_json_follows_its_schema(name: str, audit: Audit) -> None:
    jsonschema.validate(audit(SAMPLES / name).tree, SCHEMA)


@pytest.mark.parametrize("name", ALL)
def test_same_input_same_bytes(name: str, audit: Audit) -> None:
    for format in ("json", "md"):
        one, two = (audit(SAMPLES / name, format=format).text for _ in range(2))
        assert one == two
        assert str(SAMPLES) not in one
        assert str(Path.home()) not in one or str(Path.home()) == "/"


def test_headings_are_fixed(audit: Audit) -> None:
    text = audit(SAMPLES / "serve_outdated", format="md").text
    found = [line for line in text.splitlines() if line.startswith(("# ", "## "))]
    assert [h for h in found if not h.startswith(("# old", "# new", "# ("))] == [
        "# vLLM audit report", "## Basic information", "## Result overview", "## Suggestions by priority",
        "## Configuration changes", "## Details", "## Decision tree", "## Reference setup", "## Capacity", "## Notes",
    ]  # fmt: skip
    assert [line[:6] for line in text.splitlines() if line.startswith("### P")] == [
        "### P0",
        "### P1",
        "### P2",
    ]


def test_chinese_report(audit: Audit) -> None:
    english = audit(SAMPLES / "serve_outdated")
    chinese = audit(SAMPLES / "serve_outdated", "--lang", "zh")
    assert english.rules == chinese.rules
    for one, two in zip(english.tree["units"][0]["items"], chinese.tree["units"][0]["items"], strict=True):
        assert one["title"] != two["title"] or (one["title"].isascii() and one["title"] == "torch.compile")
        assert one["reason"] != two["reason"]
    text = audit(SAMPLES / "serve_outdated", "--lang", "zh", format="md").text
    assert "## 按优先级的建议" in text
    assert "{" not in text.split("## 详情")[0].replace("{'", "")


@pytest.mark.parametrize(("level", "code"), [("p0", 0), ("p1", 1), ("p2", 1), ("never", 0)])
def test_fail_on(level: str, code: int, audit: Audit) -> None:
    assert audit({"s.sh": "vllm serve Qwen/Qwen3-8B --enforce-eager\n"}, "--fail-on", level).code == code


def test_fail_on_never_with_p0(audit: Audit) -> None:
    assert audit(SAMPLES / "serve_outdated", "--fail-on", "never").code == 0


@pytest.mark.parametrize(
    "options",
    [["--format", "xml"], ["--category", "Z"], ["--vllm-version", "new"], ["--cores", "many"], ["--ram", "-1"],
     ["--max-files", "0"], ["--mode", "x"], ["--goal", "fast"], ["--no-such-option"]],
)  # fmt: skip
def test_bad_arguments(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(SAMPLES / "serve_clean"), *options]) == 2
    captured = capsys.readouterr()
    assert captured.err
    assert not captured.out


def test_unreadable_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/path"]) == 2
    assert main([]) == 2
    capsys.readouterr()


def test_nothing_could_be_parsed(audit: Audit) -> None:
    run = audit({"vllm.yaml": "a: [1, vllm\n b: }"})
    assert run.code == 2
    assert "nothing could be parsed" in run.error


def test_no_use_found(audit: Audit) -> None:
    assert audit({}).code == 3
    assert audit({"README.md": "hello", "a.py": "print('vllm')\n"}).code == 3


def test_another_engine_gets_a_hint(audit: Audit) -> None:
    run = audit({"s.sh": "python -m sglang.launch_server --model-path m --tp 2\n"})
    assert run.code == 3
    assert "another engine is used (s.sh:1)" in run.error


def test_other_libraries_stay_silent(audit: Audit) -> None:
    yaml = "model:\n  tensor_parallel_size: 4\n  pipeline_parallel_size: 2\nname: megatron\n"
    run = audit({"conf/train.yaml": yaml, "ds.json": '{"tensor_parallel_size": 2, "zero": 3}',
                 "a.py": "cfg = dict(tensor_parallel_size=2)\nengine = Engine(tensor_parallel_size=2)\n"})  # fmt: skip
    assert run.code == 3
    assert run.text == ""


def test_one_file_as_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.sh"
    script.write_text("vllm serve Qwen/Qwen3-8B --swap-space 4\n")
    assert main([str(script), "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["units"][0]["id"] == "s.sh:1"


def test_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.md"
    assert main([str(SAMPLES / "serve_clean"), "--output", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text("utf-8").startswith("# vLLM audit report")
    assert main([str(SAMPLES / "serve_clean"), "--output", str(tmp_path / "no" / "dir")]) == 2
    capsys.readouterr()


def test_selection(audit: Audit) -> None:
    run = audit(SAMPLES / "grpo_trl_server", "--category", "A,i", "--unit", "serve.sh*")
    assert [u["id"] for u in run.tree["units"]] == ["serve.sh:3"]
    assert {i["id"][0] for i in run.tree["units"][0]["items"]} == {"A", "I"}
    run = audit(SAMPLES / "serve_clean", "--mode", "standalone_offline", "--model", "Qwen/Qwen3-32B")
    assert run.tree["units"][0]["mode"] == "standalone_offline"
    assert run.tree["units"][0]["model"]["params_b"] == 32.8


def test_exclude_and_max_files(audit: Audit) -> None:
    files = {f"d{i}/s.sh": f"vllm serve m{i}\n" for i in range(5)}
    assert len(audit(files, "--exclude", "d[0-2]").tree["units"]) == 2
    run = audit(files, "--max-files", "2")
    assert len(run.tree["units"]) == 2
    assert run.tree["project"]["left_out"] == {"beyond the limit of files": 3}


def test_help_and_module_entry(tmp_path: Path) -> None:
    write(tmp_path, {"s.sh": "vllm serve Qwen/Qwen3-8B --max-model-len 8192\n"})
    command = [sys.executable, "-m", "lvllm.audit", str(tmp_path)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "python")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# vLLM audit report")
    assert main(["--help"]) == 0


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """Neither vLLM, torch, transformers nor the native module, and no socket is opened."""
    write(tmp_path, {"s.sh": "export LVLLM_MOE_NUMA_ENABLED=1\nvllm serve Qwen/Qwen3-30B-A3B\n",
                     "evil.py": "import vllm\nraise SystemExit('imported')\n",
                     "vllm.py": "raise SystemExit('imported')\n"})  # fmt: skip
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise SystemExit('network')\n"
        "socket.socket = refuse\n"
        "from lvllm.audit import main\n"
        f"rc = main([{str(tmp_path)!r}, '--format', 'json'])\n"
        "heavy = {'vllm', 'torch', 'transformers', 'numpy', 'lvllm._lk', 'requests', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else rc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "python")},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
