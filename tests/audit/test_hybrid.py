"""The K checks say what the engine itself says about the same flags: one table, one parser."""
# ruff: noqa: E501 - small projects as single lines

from __future__ import annotations

import pytest
from conftest import Audit
from lvllm import envs, flags
from lvllm.audit.checks import flagtable
from lvllm.audit.checks.rules import rules

OPTIONS = "Qwen/Qwen3-30B-A3B --max-model-len 8192 --max-num-seqs 4 --max-num-batched-tokens 16384"
OWNER = {
    "LVLLM_MOE_NUMA_ENABLED": "K1", "LK_THREADS": "K2", "LK_THREAD_BINDING": "K4", "LVLLM_NUMA_NODES": "K5",
    "LVLLM_ENABLE_NUMA_INTERLEAVE": "K5", "LVLLM_GPU_PREFILL_MIN_BATCH_SIZE": "K6", "LVLLM_GPU_PREFETCH_WINDOW": "K7",
    "LVLLM_GPU_RESIDENT_MOE_LAYERS": "K8",
}  # fmt: skip
VALUES = ("0", "1", "2", "8", "-1", "1.5", "auto", "none", "all", "yes", "off", "CPU_CORE", "numa_node", "SOCKET", "0-1,4",
          "3-1", "main:0-2,mtp:0", "x:1", "0-5,3", "4096", "cpu core", "99999999")  # fmt: skip


def engine_error(name: str, value: str) -> str | None:
    """What the engine says about one variable."""
    try:
        envs.load(None, {name: value})
    except envs.SettingError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", sorted(OWNER))
@pytest.mark.parametrize("value", VALUES)
def test_illegal_values_are_what_the_engine_refuses(name: str, value: str, audit: Audit) -> None:
    switch = "" if name == flagtable.SWITCH else f"export {flagtable.SWITCH}=1\n"
    run = audit({"s.sh": f"{switch}export {name}='{value}'\nvllm serve {OPTIONS}\n"})
    refused = engine_error(name, value)
    owner = OWNER[name]
    assert (f"{owner}.invalid" in run.rules) == (refused is not None)
    if refused is not None:
        assert run.priority(f"{owner}.invalid") == "P0"
        reason = next(i["reason"] for u in run.tree["units"] for i in u["items"] if i["id"] == owner)
        assert refused.rstrip(".") in reason


@pytest.mark.parametrize("flag", flags.FLAGS, ids=lambda f: f.name)
def test_every_name_of_the_engine_is_known(flag: flags.Flag, audit: Audit) -> None:
    for name in (flag.name, *flag.aliases):
        run = audit({"s.sh": f"export LVLLM_MOE_NUMA_ENABLED=1\nexport {name}=1\nvllm serve {OPTIONS}\n"})
        assert not [r for r in run.rules if r.startswith("X3.hybrid")], name


@pytest.mark.parametrize("name", sorted(flags.NO_EFFECT))
def test_names_without_effect(name: str, audit: Audit) -> None:
    run = audit({"s.sh": f"export LVLLM_MOE_NUMA_ENABLED=1 {name}=1\nvllm serve {OPTIONS}\n"})
    assert run.priority("K14.no_effect") == "P2"
    assert "X3.hybrid_refused" not in run.rules
    assert engine_error(name, "1") is None


@pytest.mark.parametrize("name", ["LVLLM_NO_SUCH_FLAG", "LK_THREAD", "LVLLM_GPU_PREFETCH_WINDOWS", "LK_X"])
def test_unknown_names_are_refused_with_the_same_hint(name: str, audit: Audit) -> None:
    run = audit({"s.sh": f"export LVLLM_MOE_NUMA_ENABLED=1 {name}=1\nvllm serve {OPTIONS}\n"})
    assert run.priority("X3.hybrid_refused") == "P0"
    refused = engine_error(name, "1")
    assert refused is not None
    note = next(a["reason"] for a in run.tree["advisories"] if a["rule"] == "X3.hybrid_refused")
    if "did you mean" in refused:
        assert refused.split("did you mean ")[1].split("?")[0] in note


def test_aliases_and_additional_config(audit: Audit) -> None:
    run = audit({"s.sh": f"export LK_MOE_HYBRID_ENABLED=1 LK_GPU_PREFETCH_WINDOW=4\nvllm serve {OPTIONS}\n"})
    assert {"K1.on", "K7.large"} <= set(run.rules)
    config = '{"lvllm": {"threads": 0}}'
    run = audit(
        {"s.sh": f"export LVLLM_MOE_NUMA_ENABLED=1\nvllm serve {OPTIONS} --additional-config '{config}'\n"}
    )
    assert run.priority("K2.invalid") == "P0"


def test_defaults_are_those_of_the_engine(audit: Audit) -> None:
    """A unit that sets nothing but the switch is judged by the engine's own defaults."""
    run = audit({"s.sh": f"export LVLLM_MOE_NUMA_ENABLED=1\nvllm serve {OPTIONS}\n"})
    defaults = envs.load(None, {})
    assert {"K2.auto", "K6.ok", "K7.unset"} <= set(run.rules)
    assert (defaults.threads, defaults.gpu_prefill_min_batch_size) == (None, None)
    binding = next(i for i in run.tree["units"][0]["items"] if i["id"] == "K4")
    assert defaults.thread_binding.upper() in binding["reason"]
    shown = dict(zip(("en", "zh"), (rules()["K7.unset"].text(lang) for lang in ("en", "zh")), strict=True))
    assert str(defaults.gpu_prefetch_window) in shown["en"]
    assert str(defaults.gpu_prefetch_window) in shown["zh"]


def test_lvllm_serve_sets_the_switch_itself(audit: Audit) -> None:
    run = audit({"s.sh": f"export LK_THREADS=8\nlvllm serve {OPTIONS}\n"})
    assert "K1.on" in run.rules


def test_k_is_shown_for_a_model_that_only_fits_host_memory(audit: Audit) -> None:
    files = {"s.sh": "vllm serve deepseek-ai/DeepSeek-V3\n"}
    shown = audit(files, "--gpu", "RTX 3090:1", "--ram", "1024").tree["units"][0]
    assert shown["scores"]["K"] == {"points": 0, "applicable": 1, "max": 14, "recommended": 1}
    assert "K" not in audit(files).tree["units"][0]["scores"]
