"""The library against a reference in numpy and the golden layers, on every instruction set of this CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lvllm
import numpy as np
import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
LADDER = ("scalar", "avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx")


def supported() -> list[str]:
    found = []
    for isa in LADDER:
        try:
            lvllm.Engine(isa=isa, threads=1).close()
        except lvllm.LkError:
            continue
        found.append(isa)
    return found


ISAS = supported()


@pytest.fixture(scope="module", params=ISAS)
def engine(request: pytest.FixtureRequest) -> Any:
    with lvllm.Engine(isa=request.param) as made:
        yield made


def test_scalar_is_always_there() -> None:
    assert "scalar" in ISAS


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def silu(v: np.ndarray) -> np.ndarray:
    return v / (1 + np.exp(-v))


def reference(
    x: np.ndarray, w13: np.ndarray, w2: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Gated silu experts in f64; -1 is skipped."""
    x, w13, w2 = (a.astype(np.float64) for a in (x, w13, w2))
    out = np.zeros_like(x)
    half = w13.shape[1] // 2
    for t, (row, share) in enumerate(zip(ids, weights, strict=True)):
        for e, w in zip(row, share, strict=True):
            if e >= 0:
                h = w13[e] @ x[t]
                out[t] += float(w) * (w2[e] @ (silu(h[:half]) * h[half:]))
    return out


def problem(
    tokens: int, experts: int = 8, hidden: int = 96, inter: int = 80, top_k: int = 3
) -> SimpleNamespace:
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, top_k), dtype=np.float32)
    return SimpleNamespace(
        x=rng.standard_normal((tokens, hidden), dtype=np.float32),
        w13=rng.standard_normal((experts, 2 * inter, hidden), dtype=np.float32) / hidden**0.5,
        w2=rng.standard_normal((experts, hidden, inter), dtype=np.float32) / inter**0.5,
        ids=ids,
        weights=weights / weights.sum(1, keepdims=True),
        top_k=top_k,
    )


@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 70])
def test_f32_against_the_reference(engine: lvllm.Engine, tokens: int) -> None:
    p = problem(tokens)
    layer = lvllm.MoELayer.from_arrays(engine, {"w13_weight": p.w13, "w2_weight": p.w2}, top_k=p.top_k)
    got = layer.forward(p.x, p.ids, p.weights)
    want = reference(p.x, p.w13, p.w2, p.ids, p.weights)
    assert got.dtype == np.float32
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("tokens", [1, 4, 33])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_against_the_reference(engine: lvllm.Engine, dtype: str, tokens: int) -> None:
    p = problem(tokens)
    if dtype == "bf16":
        w13, w2, x = bf16_bits(p.w13), bf16_bits(p.w2), bf16_bits(p.x)
        values = [from_bits(a) for a in (x, w13, w2)]
    else:
        w13, w2, x = (a.astype(np.float16) for a in (p.w13, p.w2, p.x))
        values = [x, w13, w2]
    layer = lvllm.MoELayer.from_arrays(
        engine,
        {"w13_weight": w13, "w2_weight": w2},
        top_k=p.top_k,
        weight_dtype=dtype if dtype == "bf16" else None,
    )
    got = layer.forward(x, p.ids, p.weights)
    want = reference(*values, p.ids, p.weights)
    got_values = from_bits(got) if dtype == "bf16" else got.astype(np.float32)
    # Tile kernels round the intermediate to bf16; one more rounding is that of the output.
    assert np.abs(got_values - want).max() < 2**-7 * np.abs(want).max()


def test_skipped_slots_expert_map_and_given_output(engine: lvllm.Engine) -> None:
    p = problem(6)
    layer = lvllm.MoELayer.from_arrays(engine, {"w13_weight": p.w13, "w2_weight": p.w2}, top_k=p.top_k)
    ids = p.ids.copy()
    ids[1, :] = -1
    ids[2, 1] = -1
    output = np.full_like(p.x, np.nan)
    assert layer.forward(p.x, ids, p.weights, output=output) is output
    want = reference(p.x, p.w13, p.w2, ids, p.weights)
    assert np.abs(output - want).max() < 1e-5 * np.abs(want).max()
    assert not output[1].any()
    # 16 global experts, of which the even ones live here in reverse order.
    mapping = np.full(16, -1, dtype=np.int32)
    mapping[::2] = np.arange(8)[::-1]
    global_ids = np.stack([np.random.default_rng(t).permutation(16)[:3] for t in range(6)]).astype(np.int32)
    got = layer.forward(p.x, global_ids, p.weights, expert_map=mapping)
    want = reference(p.x, p.w13, p.w2, mapping[global_ids], p.weights)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_torch_memory_is_used_in_place() -> None:
    torch = pytest.importorskip("torch")
    p = problem(4)
    with lvllm.Engine() as engine:
        arrays = {
            "w13_weight": torch.from_numpy(p.w13).bfloat16(),
            "w2_weight": torch.from_numpy(p.w2).bfloat16(),
        }
        layer = lvllm.MoELayer.from_arrays(engine, arrays, top_k=p.top_k)
        x = torch.from_numpy(p.x).bfloat16()
        output = torch.full_like(x, float("nan"))
        pointer = output.data_ptr()
        got = layer.forward(x, torch.from_numpy(p.ids), torch.from_numpy(p.weights), output=output)
        assert got is output
        assert output.data_ptr() == pointer
        values = [a.float().numpy() for a in (x, arrays["w13_weight"], arrays["w2_weight"])]
        want = reference(*values, p.ids, p.weights)
        assert np.abs(got.float().numpy() - want).max() < 2**-7 * np.abs(want).max()


def test_wrong_arguments_are_named() -> None:
    p = problem(2)
    with lvllm.Engine(threads=1) as engine:
        layer = lvllm.MoELayer.from_arrays(engine, {"w13_weight": p.w13, "w2_weight": p.w2}, top_k=p.top_k)
        with pytest.raises(TypeError, match="topk_ids has dtype int64, where i32 is wanted"):
            layer.forward(p.x, p.ids.astype(np.int64), p.weights)
        with pytest.raises(ValueError, match=r"hidden_states of shape .* is not contiguous"):
            layer.forward(p.x[:, ::2], p.ids, p.weights)
        with pytest.raises(TypeError, match="must be a numpy array or a torch tensor, not list"):
            layer.forward(p.x.tolist(), p.ids, p.weights)
        with pytest.raises(ValueError, match=r"moe: hidden_states is f32 \[2, 32\], expected f32 \[2, 96\]"):
            layer.forward(p.x[:, :32].copy(), p.ids, p.weights)
        bad = p.ids.copy()
        bad[0, 0] = 8
        with pytest.raises((ValueError, lvllm.LkError), match=r"\b8\b"):
            layer.forward(p.x, bad, p.weights)


def test_bad_weights_are_refused_naming_layer_and_expert() -> None:
    p = problem(1)
    p.w2[5, 3, 7] = np.nan
    with (
        lvllm.Engine() as engine,
        pytest.raises(lvllm.LkError, match=r"model\.layers\.3.*expert 5|expert 5.*layers\.3"),
    ):
        lvllm.MoELayer.from_arrays(
            engine, {"w13_weight": p.w13, "w2_weight": p.w2}, top_k=p.top_k, name="model.layers.3.mlp.experts"
        )


def test_a_layer_is_sealed_only_when_whole_and_can_be_loaded_again() -> None:
    p = problem(3)
    with lvllm.Engine() as engine:
        layer = lvllm.MoELayer(
            engine,
            format="f32",
            num_experts=8,
            hidden_size=96,
            intermediate_size=80,
            top_k=3,
            dtype="f32",
            name="L",
        )
        for e in range(7):
            layer.load_expert(e, {"w13_weight": p.w13[e], "w2_weight": p.w2[e]})
        with pytest.raises(lvllm.LkError, match=r"L.*7"):
            layer.seal()
        layer.load_expert(7, {"w13_weight": p.w13[7], "w2_weight": p.w2[7]})
        layer.seal()
        first = layer.forward(p.x, p.ids, p.weights)
        layer.reset()
        for e in range(8):
            layer.load_expert(e, {"w13_weight": p.w13[e], "w2_weight": 2 * p.w2[e]})
        layer.seal()
        assert np.allclose(layer.forward(p.x, p.ids, p.weights), 2 * first, rtol=1e-6)


def test_other_python_threads_run_during_a_forward() -> None:
    rng = np.random.default_rng(0)
    w13 = rng.standard_normal((4, 2048, 1024), dtype=np.float32) * 0.02
    w2 = rng.standard_normal((4, 1024, 1024), dtype=np.float32) * 0.02
    x = rng.standard_normal((512, 1024), dtype=np.float32)
    ids = np.tile(np.arange(2, dtype=np.int32), (512, 1))
    weights = np.full((512, 2), 0.5, dtype=np.float32)
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    with lvllm.Engine(threads=1, isa="scalar") as engine:
        layer = lvllm.MoELayer.from_arrays(engine, {"w13_weight": w13, "w2_weight": w2}, top_k=2)
        thread = threading.Thread(target=count)
        thread.start()
        before, begin = ticks, time.perf_counter()
        layer.forward(x, ids, weights)
        during, seconds = ticks - before, time.perf_counter() - begin
        stop.set()
        thread.join()
    assert during > 5, f"{during} ticks in {seconds:.2f} s: the GIL was held"


FORK = """
import os, numpy as np, lvllm
w13, w2 = np.full((2, 128, 64), 0.01, np.float32), np.full((2, 64, 64), 0.01, np.float32)
x, ids, share = np.ones((1, 64), np.float32), np.array([[0]], np.int32), np.ones((1, 1), np.float32)
engine = lvllm.Engine()
layer = lvllm.MoELayer.from_arrays(engine, {"w13_weight": w13, "w2_weight": w2}, top_k=1)
expected = layer.forward(x, ids, share)
if os.fork() == 0:
    try:
        layer.forward(x, ids, share)
        print("used the parent's engine")
    except lvllm.LkError as error:
        with lvllm.Engine() as own:
            mine = lvllm.MoELayer.from_arrays(own, {"w13_weight": w13, "w2_weight": w2}, top_k=1)
            print("refused, own engine equal:", (mine.forward(x, ids, share) == expected).all(), flush=True)
    os._exit(0)
os.wait()
print("parent still works:", (layer.forward(x, ids, share) == expected).all())
"""


def test_a_child_forked_from_a_live_engine_is_refused_and_can_make_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["refused, own engine equal: True", "parent still works: True"], (
        done.stderr
    )


def layer_math() -> dict[str, Any]:
    """route() and act() of the second implementation beside the golden files."""
    source = (GOLDEN / "check_moe_layers.py").read_text().partition("\nbad = 0")[0]
    names: dict[str, Any] = {}
    exec(compile(source, "check_moe_layers.py", "exec"), names)
    return names


def test_the_second_implementation_reproduces_the_golden_layers() -> None:
    command = [sys.executable, str(GOLDEN / "check_moe_layers.py"), str(GOLDEN / "moe_layers")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


def family_options(name: str, config: dict[str, Any]) -> dict[str, Any]:
    if name.startswith("nemotron"):
        return {"activation": "relu2", "gated": False}
    if name == "gpt_oss":
        return {"activation": "swigluoai", "interleaved": True}
    if name == "minimax_m3":
        keys = {"limit": "swiglu_limit", "alpha": "swiglu_alpha", "beta": "swiglu_beta"}
        return {"activation": "swigluoai"} | {k: config[v] for k, v in keys.items() if v in config}
    if name == "gemma4":
        return {"activation": "gelu_tanh"}
    if name.startswith("step3p7") and config["swiglu_limits"][1]:
        return {"activation": "swiglustep", "limit": config["swiglu_limits"][1]}
    if name.startswith("deepseek_v4"):
        return {"limit": config["swiglu_limit"]}
    return {"router_weight_on_input": True} if name == "llama4" else {}


@pytest.mark.parametrize("path", sorted((GOLDEN / "moe_layers").glob("*.safetensors")), ids=lambda p: p.stem)
def test_golden_layers(engine: lvllm.Engine, path: Path) -> None:
    """The routed part of each family's layer, in f32 against f64; also against y where that is all."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118  # safe_open is no mapping
    name = path.stem
    params = {k[2:]: v for k, v in tensors.items() if k.startswith("p.")}
    wide = {k: v.astype(np.float64) if v.dtype != np.int64 else v for k, v in params.items()}
    x = tensors["x"].astype(np.float64)
    math = layer_math()
    ids, weights = math["route"](name, config, wide, x, tensors.get("input_ids"))
    if isinstance(weights, tuple):
        weights = weights[0]
    if latent := "fc1_latent_proj.weight" in wide:
        x = x @ wide["fc1_latent_proj.weight"].T
    up, down = params.get("experts.gate_up_proj", params.get("experts.up_proj")), params["experts.down_proj"]
    if name in ("gpt_oss", "llama4"):
        up, down = up.transpose(0, 2, 1), down.transpose(0, 2, 1)
    experts = down.shape[0]
    arrays = {"w13_weight": np.ascontiguousarray(up[:experts]), "w2_weight": np.ascontiguousarray(down)}
    for ours, theirs in (("w13_bias", "experts.gate_up_proj_bias"), ("w2_bias", "experts.down_proj_bias")):
        if theirs in params:
            arrays[ours] = params[theirs]
    options = family_options(name, config)
    layer = lvllm.MoELayer.from_arrays(engine, arrays, top_k=ids.shape[1], **options)
    local = np.where(ids < experts, ids, -1).astype(np.int32)  # zero experts are the caller's to add
    got = layer.forward(x.astype(np.float32), local, weights.astype(np.float32))
    want = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(local[t], weights[t], strict=True):
            if e < 0:
                continue
            scaled = x[t] * w if options.get("router_weight_on_input") else x[t]
            h = arrays["w13_weight"][e].astype(np.float64) @ scaled + (
                arrays["w13_bias"][e] if "w13_bias" in arrays else 0
            )
            out = arrays["w2_weight"][e].astype(np.float64) @ math["act"](name, config, h)
            out = out + (arrays["w2_bias"][e] if "w2_bias" in arrays else 0)
            want[t] += out if options.get("router_weight_on_input") else w * out
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()
    shared = any(k.startswith("shared") for k in params)
    if not (shared or latent or (ids >= experts).any()):
        assert np.abs(got - tensors["y"]).max() < 2e-5 * np.abs(tensors["y"]).max()
