"""The ten sample projects: hand-written expectations, and golden files in both formats.

``UPDATE_GOLDEN=1 pytest tests/audit/test_samples.py`` rewrites the golden files.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import Audit
from lvllm.audit import pipeline
from lvllm.audit.report import guide

SAMPLES = Path(__file__).parent / "samples"
GOLDEN = Path(__file__).parent / "golden"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((SAMPLES / "samples.toml").read_text("utf-8"))


def found(tree: dict[str, Any], priority: str) -> list[str]:
    entries = [i for u in tree["units"] for i in u["items"]] + tree["advisories"]
    return sorted(e["id"] for e in entries if e["priority"] == priority)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_sample_finds_what_it_must(name: str, audit: Audit) -> None:
    want = EXPECTED[name]
    run = audit(SAMPLES / name, *want["args"])
    tree = run.tree
    assert found(tree, "P0") == sorted(want["p0"])
    assert found(tree, "P1") == sorted(want["p1"])
    assert set(want.get("p2", [])) <= set(found(tree, "P2"))
    assert [u["mode"] for u in tree["units"]] == want["modes"]
    assert run.code == want["exit"]
    items = {i["id"]: i["status"] for u in tree["units"] for i in u["items"]}
    assert {i: items[i] for i in want.get("enabled", [])} == dict.fromkeys(want.get("enabled", []), "enabled")
    absent = want.get("not_applicable", [])
    assert {i: items[i] for i in absent} == dict.fromkeys(absent, "not_applicable")
    if "command" in want:
        assert any(c["after"] == want["command"] for u in tree["units"] for c in u["changes"])


@pytest.mark.parametrize("name", [n for n in sorted(EXPECTED) if "template" in EXPECTED[n]])
def test_sample_gets_its_template(name: str, audit: Audit) -> None:
    run = audit(SAMPLES / name, *EXPECTED[name]["args"], format="md")
    heading = run.text.split("## Reference setup")[1].split("## Capacity")[0].strip()
    assert heading.startswith(str(EXPECTED[name]["template"]))


@pytest.mark.parametrize("format", ["json", "md"])
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_sample_matches_its_golden_file(
    name: str, format: str, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lvllm.audit.report.build.tool_version", lambda: "test")
    # What a build of the engine says about its own flags is not the sample's business.
    monkeypatch.setattr("lvllm.audit.checks.flagtable.notices", lambda context: [])
    run = audit(SAMPLES / name, *EXPECTED[name]["args"], format=format)
    golden = GOLDEN / f"{name}.{format}"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(run.text, "utf-8")
    assert run.text == golden.read_text("utf-8")


def test_facts_of_the_samples(audit: Audit) -> None:
    verl = audit(SAMPLES / "verl_moe").tree["units"][0]
    assert verl["model"]["moe"] is True
    assert verl["hardware"]["count"] == 8
    assert verl["parallel"]["tensor"] == 4
    k8s = audit(SAMPLES / "k8s_lora").tree["units"][0]
    assert k8s["model"]["name"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert k8s["hardware"]["cores"] == 2
    hybrid = audit(SAMPLES / "hybrid_moe", *EXPECTED["hybrid_moe"]["args"]).tree["units"][0]
    assert hybrid["scores"]["K"]["max"] == 14
    assert "K" not in json.dumps(hybrid["scores"]["total"])
    assert hybrid["scores"]["total"]["max"] == 52


def test_template_follows_mode_and_size() -> None:
    request = pipeline.Request(SAMPLES / "serve_clean")
    result = pipeline.run(request)
    assert guide.template(result.units[0].context)["number"] == 1
