"""Damaged, hostile and very large projects end in a report, never in a traceback."""
# ruff: noqa: E501 - small projects as single lines

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from conftest import Audit, write
from lvllm.audit import pipeline, scan

SAMPLES = Path(__file__).parent / "samples"
NAMES = ("a.py", "a.ipynb", "s.sh", "Makefile", "justfile", "Procfile", "r.ps1", "Dockerfile", "compose.yaml", "c.yaml",
         "c.toml", "c.json", "v.service", ".env", "requirements.txt", "pyproject.toml", "uv.lock", "setup.cfg",
         "environment.yml", "Pipfile", "Pipfile.lock", "README.md", "README.rst", "j.slurm", "config.json")  # fmt: skip


def seeds() -> list[bytes]:
    """Real content of every kind, to be mutilated."""
    found = [p.read_bytes() for p in sorted(SAMPLES.rglob("*")) if p.is_file()]
    found.append(
        json.dumps(
            {"cells": [{"cell_type": "code", "source": ["from vllm import LLM\n", "LLM('m')"]}]}
        ).encode()
    )
    found.append(b"vllm serve ${A[@]} $(x) `y` <<EOF\n$((1+2)) ${a:-${b:-c}}\nEOF\n")
    found.append(b"a: &a [*a]\nb: !!python/object:os.system x\nvllm: {<<: *a}\n")
    return found


def mutilate(data: bytes, random_source: random.Random) -> bytes:
    """Cut, repeat, shuffle or overwrite parts of `data`."""
    out = bytearray(data)
    for _ in range(random_source.randint(1, 8)):
        if not out:
            break
        at = random_source.randrange(len(out))
        match random_source.randrange(6):
            case 0:
                del out[at : at + random_source.randint(1, 40)]
            case 1:
                out[at:at] = out[at : at + 30] * random_source.randint(1, 4)
            case 2:
                out[at] = random_source.randrange(256)
            case 3:
                out[at:at] = random_source.choice(
                    [b"{", b"}", b"'", b'"', b"$(", b"${", b"\\", b"\n\t", b": ", b"[", b"&x "]
                )
            case 4:
                out[at:at] = random_source.choice(["é", "\u2028", "\ufeff", "\U0001d518"]).encode()
            case 5:
                del out[at:]
    return bytes(out)


def test_random_and_mutilated_files(audit: Audit) -> None:
    """Every kind of file, mutilated and random: 300 projects of one file beside one good one."""
    source = random.Random(20)
    content = seeds()
    for i in range(300):
        data = (
            mutilate(source.choice(content), source) if i % 4 else source.randbytes(source.randint(0, 2000))
        )
        if i % 5 == 0:
            data += b"\nvllm serve x"
        name = NAMES[i % len(NAMES)]
        run = audit(
            {name: data, "good/serve.sh": "vllm serve Qwen/Qwen3-8B\n"}, format="md" if i % 2 else "json"
        )
        assert run.code in (0, 1), (i, name, run.error)
        assert "not read (" not in run.text, (i, name, run.text[-500:])


def test_a_failing_reader_costs_one_file(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("lvllm.audit.readers.python.read", fail)
    run = audit({"a.py": "import vllm\n", "s.sh": "vllm serve Qwen/Qwen3-8B\n"})
    assert run.tree["project"]["warnings"] == ["a.py: not read (RuntimeError)"]
    assert len(run.tree["units"]) == 1


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("bad.yaml", b"vllm: [\n  {a: b\n"),
        ("bad.py", b"import vllm\ndef f(:\n"),
        ("bad.toml", b"vllm = = 1\n"),
        ("bad.json", b'{"vllm_mode": }'),
        ("bad.ipynb", b'{"cells": vllm}'),
    ],
)
def test_one_warning_for_a_broken_file(name: str, data: bytes, audit: Audit) -> None:
    run = audit({name: data, "s.sh": "vllm serve Qwen/Qwen3-8B\n"})
    project = run.tree["project"]
    assert len(project["warnings"]) == 1
    assert project["warnings"][0].startswith(name)
    assert project["files_failed"] == 1


def test_binary_and_huge_files_are_left_out(audit: Audit) -> None:
    run = audit(
        {"a.py": b"\x7fELF\0vllm" * 10, "b.py": b"# vllm\n" + b"#" * (2 * 2**20), "s.sh": "vllm serve m\n"}
    )
    assert run.tree["project"]["left_out"] == {"larger than 2 MiB": 1}
    assert run.tree["project"]["warnings"] == []


def test_deep_and_exploding_input(audit: Audit) -> None:
    bomb = "a: &a [vllm, vllm]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(22)
    )
    deep_yaml = "vllm: " + "[" * 3000
    deep_json = '{"vllm_mode":' + "[" * 50_000
    deep_python = "import vllm\nx = " + "(" * 400 + ")" * 400 + "\n" + "y = " + "-" * 5000 + "1\n"
    deep_shell = "vllm serve m " + "$(" * 2000 + "\n" + "if x; then " * 500 + "\n"
    cycle = (
        "X=$X\nY=${Y:-$X}\nX=$Y$X\nX+=$X\nvllm serve $X $Y\n"
        + "A+=$A\nA+=aaaaaaaaaaaaaaaa\nA=$A$A$A$A\n" * 12
        + "vllm serve $A\n"
    )
    run = audit({"bomb.yaml": bomb, "deep.yaml": deep_yaml, "deep.json": deep_json, "deep.py": deep_python,
                 "deep.sh": deep_shell, "cycle.sh": cycle, "s/s.sh": "vllm serve Qwen/Qwen3-8B\n"})  # fmt: skip
    assert run.code == 0, run.error
    assert any(u["id"] == "s/s.sh:1" for u in run.tree["units"])


def test_nothing_outside_the_path_is_read(tmp_path: Path, audit: Audit) -> None:
    outside = write(
        tmp_path / "outside", {"s.sh": "vllm serve outside\n", "config.json": '{"num_experts": 8}'}
    )
    inside = write(tmp_path / "inside", {"good/s.sh": "vllm serve ../outside\nvllm serve ./loop\n"})
    (inside / "link.sh").symlink_to(outside / "s.sh")
    (inside / "folder").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "dead.sh").symlink_to(inside / "gone.sh")
    (inside / "inner.sh").symlink_to(inside / "good" / "s.sh")
    run = audit(inside)
    assert {u["site"] if "site" in u else u["id"].partition(":")[0] for u in run.tree["units"]} == {
        "good/s.sh",
        "inner.sh",
    }
    assert run.tree["project"]["left_out"] == {
        "symbolic link out of the project": 3, "symbolic link to a folder already seen": 1,
    } or run.tree["project"]["left_out"].get("symbolic link out of the project", 0) >= 2  # fmt: skip
    assert all(u["model"]["source"] == "name" for u in run.tree["units"])


def test_unreadable_files_and_pipes(tmp_path: Path, audit: Audit) -> None:
    folder = write(tmp_path / "p", {"s.sh": "vllm serve Qwen/Qwen3-8B\n"})
    os.mkfifo(folder / "pipe.py")
    os.mkfifo(folder / ".env")
    assert audit(folder).code == 0


def test_limits_are_told(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_TOTAL_BYTES", 100)
    run = audit({f"f{i}.sh": f"vllm serve m{i} # {'x' * 30}\n" for i in range(5)}, format="md")
    assert "beyond 200 MiB in all" in run.text


def test_skipped_folders(audit: Audit) -> None:
    files = {
        f"{d}/s.sh": "vllm serve m\n"
        for d in (".git", "node_modules", ".venv", "site-packages", "build", "wandb")
    }
    assert audit(files).code == 3


def test_a_tree_of_100000_files(tmp_path: Path) -> None:
    """The limit of files holds, the rest is counted, and the order decides which files are seen."""
    for i in range(100):
        folder = tmp_path / f"d{i:03}"
        folder.mkdir()
        for j in range(1000):
            os.close(os.open(folder / f"{j:04}.txt", os.O_CREAT | os.O_WRONLY))
    (tmp_path / "a.sh").write_text("vllm serve Qwen/Qwen3-8B\n")
    result = pipeline.run(pipeline.Request(tmp_path))
    assert [a.unit.id for a in result.units] == ["a.sh:1"]
    assert result.scan.visited == scan.MAX_FILES
    assert result.scan.left_out == {"beyond the limit of files": 100_001 - scan.MAX_FILES}
