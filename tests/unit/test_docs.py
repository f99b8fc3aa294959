"""The documents name only verbs, commands, files and settings that exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TEXTS = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS]

# `make VERB` and `lvllm COMMAND` in code spans and code blocks; prose such as "make it" is none.
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def code_of(path: Path) -> str:
    return "\n".join(CODE.findall(path.read_text()))


def make_verbs() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_readme_and_friends_exist() -> None:
    names = {path.name for path in DOCUMENTS}
    assert {
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "flags.md",
        "install.md",
    } <= names


@pytest.mark.parametrize("path", TEXTS)
def test_make_verbs_exist(path: Path) -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code_of(path)))
    assert named <= make_verbs()


def test_make_help_lists_the_verbs_that_readme_names() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for verb in re.findall(r"\bmake ([a-z][a-z-]*)", code_of(ROOT / "README.md")):
        assert re.search(rf"^make {verb}\s", listed, re.MULTILINE), verb


def test_make_help_has_no_verb_without_a_rule() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    verbs = set(re.findall(r"^make ([a-z-]+)", listed, re.MULTILINE))
    assert len(verbs) > 10
    assert verbs <= make_verbs()


@pytest.mark.skipif(
    importlib.util.find_spec("lvllm.cli") is None, reason="this build has no module lvllm.cli"
)
def test_commands_exist() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "lvllm.cli", "--help"], capture_output=True, text=True, check=True, cwd="/"
    )
    named = {
        command
        for path in DOCUMENTS
        for command in re.findall(r"(?<![\w./-])lvllm ([a-z]+)\b", code_of(path))
    }
    assert "doctor" in named
    missing = {command for command in named if not re.search(rf"\b{command}\b", run.stdout)}
    assert not missing, f"`lvllm --help` does not list {sorted(missing)}"


@pytest.mark.parametrize("path", TEXTS)
def test_links_and_paths_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (path.parent / target).exists(), target
    # VERSION stands for any, as in the name of a constraints file.
    for name in re.findall(r"`((?:tools|docs|crates|tests|models|python)/[A-Za-z0-9_./*-]+)", text):
        assert list(ROOT.glob(name.rstrip("./").replace("VERSION", "*"))), name


@pytest.mark.parametrize("path", TEXTS)
def test_settings_exist(path: Path) -> None:
    from lvllm import flags

    known = {name for flag in flags.FLAGS for name in (flag.name, *flag.aliases)} | set(flags.NO_EFFECT)
    # Not settings of the engine: the download cache of the make verbs.
    known.add("LVLLM_CACHE")
    named = set(re.findall(r"\b((?:LVLLM|LK)_[A-Z][A-Z_]*[A-Z])\b", code_of(path)))
    assert named <= known
