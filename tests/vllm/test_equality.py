"""Hybrid output against stock vLLM: greedy, float32, 8 prompts of 24 tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import CPU_MLA, MTP, ON, StockCache, assert_same, run_engine

Models = Callable[[str], Path]


@pytest.mark.parametrize(
    ("kind", "engine", "host"),
    [
        ("mixtral", {}, {"main:0", "main:1", "main:2", "main:3"}),
        ("gpt_oss", {}, {"main:0", "main:1", "main:2", "main:3"}),
        pytest.param("deepseek_v3", CPU_MLA, {"main:1", "main:2", "main:3"}, marks=pytest.mark.slow),
        ("deepseek_v3_mtp", MTP, {"main:1", "main:2", "main:3", "mtp:0"}),
        pytest.param("qwen3_moe_mixed", {}, {"main:1", "main:3"}, marks=pytest.mark.slow),
    ],
)
def test_families(
    kind: str, engine: dict[str, Any], host: set[str], stock: StockCache, models: Models, tmp_path: Path
) -> None:
    mine = run_engine(tmp_path, models(kind), engine=engine, actions=("generate", "placement"), **ON)
    assert_same(stock(kind, engine), mine.generated())
    (rows,) = mine.generated("placement")
    assert {f"{r['id']['part']}:{r['id']['index']}" for r in rows if r["where"] == "host"} == host
    assert all(r["bytes"] > 0 for r in rows)


def test_reload_and_layers_left_to_stock(stock: StockCache, models: Models, tmp_path: Path) -> None:
    """Reloading gives the same tokens; layers kept on stock's path change nothing but the placement."""
    expected = stock("qwen3_moe")
    mine = run_engine(
        tmp_path, models("qwen3_moe"), actions=("generate", "reload", "reload", "placement"), **ON
    )
    assert_same(expected, mine.generated())
    assert_same(expected, mine.generated("reload", 0))
    assert_same(expected, mine.generated("reload", 1))
    mixed = run_engine(
        tmp_path,
        models("qwen3_moe"),
        actions=("generate", "placement"),
        LVLLM_GPU_RESIDENT_MOE_LAYERS="1-2",
        **ON,
    )
    assert_same(expected, mixed.generated())
    (whole,), (partly,) = mine.generated("placement"), mixed.generated("placement")
    assert [r["where"] for r in whole] == ["host"] * 4
    assert [r["where"] for r in partly] == ["host", "stock", "stock", "host"]
    assert sum(r["bytes"] for r in partly) == sum(r["bytes"] for r in whole) / 2
    assert "main:1-2" in mixed.text


def test_compiled_and_in_processes_of_their_own(stock: StockCache, models: Models, tmp_path: Path) -> None:
    mine = run_engine(
        tmp_path,
        models("qwen3_moe"),
        engine={"enforce_eager": False},
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        **ON,
    )
    assert_same(stock("qwen3_moe"), mine.generated())


def test_tensor_parallel(stock: StockCache, models: Models, tmp_path: Path) -> None:
    """Each of two ranks holds half of gate and half of up (not the first half of the pair)."""
    mine = run_engine(
        tmp_path,
        models("qwen3_moe"),
        engine={"tensor_parallel_size": 2},
        actions=("generate", "placement"),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        **ON,
    )
    assert_same(stock("qwen3_moe"), mine.generated())
    ranks = mine.generated("placement")
    assert len(ranks) == 2
    assert {r["bytes"] for rows in ranks for r in rows} == {ranks[0][0]["bytes"]}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_models_agree_closely(dtype: str, stock: StockCache, models: Models, tmp_path: Path) -> None:
    """Random models amplify rounding, so only the log-probabilities of given prompts are compared."""
    engine = {"dtype": dtype}
    theirs = stock("qwen3_moe", engine)
    mine = run_engine(tmp_path, models("qwen3_moe"), engine=engine, **ON).generated()
    for a, b in zip(mine["prompt_logprobs"], theirs["prompt_logprobs"], strict=True):
        assert max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0) < 0.5


def test_the_switch_at_zero_is_stock(stock: StockCache, models: Models, tmp_path: Path) -> None:
    mine = run_engine(
        tmp_path, models("mixtral"), actions=("generate", "modules"), LVLLM_MOE_NUMA_ENABLED="0"
    )
    expected = stock("mixtral")
    assert mine.generated() == expected, "not merely close: bit by bit"
    loaded = mine.generated("modules")
    assert set(loaded["lvllm"]) <= {
        "lvllm",
        "lvllm.plugin",
        "lvllm.envs",
        "lvllm.flags",
        "lvllm.host",
        "lvllm.ranges",
    }
    assert "lvllm" not in loaded["hook_file"]


def test_dummy_weights_are_made_by_the_engine_and_real_ones_can_follow(
    stock: StockCache, models: Models, tmp_path: Path
) -> None:
    mine = run_engine(
        tmp_path,
        models("qwen3_moe"),
        engine={"load_format": "dummy"},
        actions=("generate", "load_real", "placement"),
        **ON,
    )
    assert mine.generated()["tokens"] != stock("qwen3_moe")["tokens"]
    assert_same(stock("qwen3_moe"), mine.generated("load_real"))
