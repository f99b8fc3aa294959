"""The command line."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from lvllm import cli


def lvllm(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LVLLM_", "LK_"))} | environ
    command = [sys.executable, "-m", "lvllm.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")


def doctor(**environ: str) -> tuple[dict[str, Any], int]:
    result = lvllm("doctor", "--json", "--no-measure", **environ)
    assert result.stdout, result.stderr
    return json.loads(result.stdout), result.returncode


def test_doctor_names_the_machine_and_every_setting() -> None:
    facts, code = doctor(LK_THREADS="1")
    assert facts["engine"]["threads"] == 1
    assert facts["memory"]["available_bytes"] > 0
    assert facts["memory"]["nodes"]
    row = next(r for r in facts["configuration"] if r["setting"] == "LK_THREADS")
    assert row == {"setting": "LK_THREADS", "value": "1", "from": "environment"}
    assert code == (1 if facts["warnings"] else 0)


def test_doctor_reports_a_wrong_setting_as_a_warning_and_exits_1() -> None:
    facts, code = doctor(LVLLM_KERNAL="amx")
    assert code == 1
    assert any(
        "LVLLM_KERNAL is not a setting of lvllm; did you mean LVLLM_KERNEL?" in w for w in facts["warnings"]
    )


@pytest.mark.parametrize("family", ["f32_fma", "bf16_dot", "amx"])
def test_doctor_pins_the_kernel_family(family: str) -> None:
    """On a CPU that lacks the family the engine's refusal is a warning."""
    facts, _ = doctor(LVLLM_KERNEL=family)
    wanted = {"f32_fma": "f32fma", "bf16_dot": "bf16dot", "amx": "bf16amx"}[family]
    if "kernels" in facts:
        assert facts["kernels"]["bf16"]["many"].startswith(wanted)
    else:
        assert any("LVLLM_KERNEL" in w or wanted in w for w in facts["warnings"]), facts["warnings"]


def test_doctor_follows_the_inherited_cpu_mask() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    result = subprocess.run(
        [
            "taskset",
            "-c",
            str(cpus[-1]),
            sys.executable,
            "-m",
            "lvllm.cli",
            "doctor",
            "--json",
            "--no-measure",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    facts = json.loads(result.stdout)
    assert facts["allowed_cpus"] == str(cpus[-1])
    assert facts["engine"]["threads"] == 1


def test_doctor_as_text() -> None:
    result = lvllm("doctor", "--no-measure")
    assert "configuration" in result.stdout
    assert "LVLLM_MOE_NUMA_ENABLED" in result.stdout


def test_bench_prints_rates_beside_the_read_rate() -> None:
    arguments = (
        "--tokens 1,4 --hidden-size 256 --intermediate-size 128 --experts 8 --top-k 2 --seconds 0.05 --json"
    )
    result = lvllm("bench", *arguments.split())
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert [r["tokens"] for r in report["rows"]] == [1, 4]
    assert report["read_gb_per_s"] > 0
    for row in report["rows"]:
        assert row["of_read"] == pytest.approx(row["gb_per_s"] / report["read_gb_per_s"], abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "x"], "--tokens"),
        (["--top-k", "9", "--experts", "8"], "more than --experts"),
        (["--format", "q7"], "q7"),
    ],
)
def test_bench_refuses_what_does_not_fit(arguments: list[str], message: str) -> None:
    result = lvllm("bench", "--seconds", "0.01", *arguments)
    assert result.returncode in (1, 2)
    assert message in result.stderr


def test_usage_errors_exit_2() -> None:
    assert lvllm("no-such-command").returncode == 2
    assert lvllm().returncode == 2


def test_serve_hands_every_option_to_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    needs_vllm()
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$LVLLM_MOE_NUMA_ENABLED $@"\n')
    program.chmod(0o755)
    result = lvllm("serve", "MODEL", "--port", "1", "--help", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.stdout.strip() == "1 serve MODEL --port 1 --help", result.stderr


def test_serve_refuses_a_plugin_list_without_us(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    needs_vllm()
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("LVLLM_MOE_NUMA_ENABLED", "0")
    assert cli.serve(["MODEL"]) == 1
    assert "VLLM_PLUGINS='other' keeps the plugin" in capsys.readouterr().err
