"""Weight intake without vLLM: a layer with what intake uses of it, and a loader that writes halves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lvllm
import numpy as np
import pytest

torch = pytest.importorskip("torch")
loader = pytest.importorskip("lvllm.vllm.loader")

EXPERTS, HIDDEN, INTER = 4, 256, 128


class Layer(torch.nn.Module):
    """Stands for RoutedExperts: w13 is [E, 2I, H], w2 [E, H, I]."""

    layer_name = "model.layers.0.mlp.experts"
    local_num_experts = EXPERTS

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"w13_weight": (2 * INTER, HIDDEN), "w2_weight": (HIDDEN, INTER)}.items():
            param = torch.nn.Parameter(torch.empty(EXPERTS, *shape), requires_grad=False)
            param.weight_loader = self.stock_loader
            self.register_parameter(name, param)

    def stock_loader(
        self, param: Any, weight: Any, name: str, shard: str, expert: int, return_success: bool = False
    ) -> bool | None:
        target = param.data[expert]
        if shard in ("w1", "w3"):
            target = target.narrow(0, 0 if shard == "w1" else INTER, INTER)
        target.copy_(weight)
        return True if return_success else None


@pytest.fixture
def made() -> Any:
    from lvllm.vllm.formats import WeightFormat
    from lvllm.vllm.progress import LoadProgress

    rng = np.random.default_rng(0)
    with lvllm.Engine() as engine:
        layer = Layer()
        fmt = WeightFormat("f32", ("w13_weight", "w2_weight"))
        native = engine.native.create_layer(
            layer.layer_name,
            format="f32",
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INTER,
            top_k=2,
            dtype="f32",
        )
        params = dict(layer.named_parameters())
        intake = loader.LayerIntake(layer, params, fmt, native, LoadProgress(), skip_w2_bias=False)
        layer.quant_method = SimpleNamespace(intake=intake)
        weights = {
            "w13": torch.from_numpy(
                rng.standard_normal((EXPERTS, 2 * INTER, HIDDEN), dtype=np.float32) * 0.1
            ),
            "w2": torch.from_numpy(rng.standard_normal((EXPERTS, HIDDEN, INTER), dtype=np.float32) * 0.1),
        }
        yield SimpleNamespace(layer=layer, intake=intake, native=native, weights=weights)


def load(made: Any, expert: int, shards: tuple[str, ...] = ("w1", "w3", "w2")) -> None:
    for shard in shards:
        name = "w2_weight" if shard == "w2" else "w13_weight"
        param = getattr(made.layer, name)
        whole = made.weights["w2" if shard == "w2" else "w13"][expert]
        part = whole if shard == "w2" else whole[:INTER] if shard == "w1" else whole[INTER:]
        assert param.weight_loader(param, part, name, shard, expert, return_success=True)


def finish(made: Any) -> None:
    made.intake.finish({n: p.data for n, p in made.layer.named_parameters()})


def output(made: Any) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((3, HIDDEN), dtype=np.float32)
    ids = np.array([[0, 1], [2, 3], [3, 0]], dtype=np.int32)
    share = np.full((3, 2), 0.5, dtype=np.float32)
    out = np.empty_like(x)
    refs = [lvllm.engine.tensors.tensor_ref(a, "a") for a in (x, ids, share, out)]
    made.native.forward(*refs)
    want = np.zeros_like(x)
    for t in range(3):
        for e in ids[t]:
            h = made.weights["w13"][e].numpy() @ x[t]
            gate, up = h[:INTER], h[INTER:]
            want[t] += 0.5 * (made.weights["w2"][e].numpy() @ (gate / (1 + np.exp(-gate)) * up))
    assert np.abs(out - want).max() < 1e-5 * np.abs(want).max()
    return out


def test_an_expert_is_packed_when_it_is_complete_and_its_pages_go_back(made: Any) -> None:
    for expert in (2, 0, 3):
        load(made, expert, ("w2", "w3"))
    assert not any(made.intake.packed)
    held = {n: b.resident_bytes() for n, b in made.intake.buffers.items()}
    for expert in (3, 0, 2):
        load(made, expert, ("w1",))
    assert made.intake.packed == [True, False, True, True]
    kept = {n: b.resident_bytes() for n, b in made.intake.buffers.items()}
    assert kept == {n: 0 for n in held}, f"of {held}"
    load(made, 1)
    finish(made)
    output(made)


def test_direct_writes_are_packed_at_the_end(made: Any) -> None:
    made.layer.w13_weight.data.copy_(made.weights["w13"])
    made.layer.w2_weight.data.copy_(made.weights["w2"])
    assert not any(made.intake.packed)
    finish(made)
    output(made)


def test_a_tensor_stacked_over_experts_counts_for_each(made: Any) -> None:
    with loader._WriteCounter() as counter:
        made.layer.w13_weight.data[1:3, :INTER].copy_(made.weights["w13"][1:3, :INTER])
    touched = made.intake.note_writes("w13_weight", made.layer.w13_weight.data, counter)
    assert touched == [1, 2]
    assert made.intake.written["w13_weight"] == [0, INTER * HIDDEN, INTER * HIDDEN, 0]


@pytest.mark.parametrize("lost", ["w1", "w2", "w3"])
def test_a_missing_part_is_named(made: Any, lost: str) -> None:
    for expert in range(EXPERTS):
        load(made, expert, tuple(s for s in ("w1", "w3", "w2") if expert != 2 or s != lost))
    name = "w2_weight" if lost == "w2" else "w13_weight"
    with pytest.raises(loader.IncompleteWeightsError, match=rf"{name} of 1 experts \(2\) is incomplete"):
        finish(made)


def test_a_part_that_is_written_twice_is_named(made: Any) -> None:
    for expert in range(EXPERTS):
        load(made, expert)
    load(made, 1, ("w2",))
    with pytest.raises(
        loader.IncompleteWeightsError, match=r"w2_weight of 1 experts \(1\) is written more than once"
    ):
        finish(made)


def test_a_parameter_that_nothing_writes_is_named(made: Any) -> None:
    made.layer.w13_weight.data.copy_(made.weights["w13"])
    with pytest.raises(loader.IncompleteWeightsError, match="w2_weight was never loaded"):
        finish(made)


def test_weights_can_be_loaded_again_after_sealing(made: Any) -> None:
    for expert in range(EXPERTS):
        load(made, expert)
    finish(made)
    first = output(made)
    made.weights["w2"] *= 2
    for name in ("w13_weight", "w2_weight"):  # a reload brings memory of its own
        old = getattr(made.layer, name)
        fresh = torch.nn.Parameter(torch.empty_like(old), requires_grad=False)
        vars(fresh).update(vars(old))
        setattr(made.layer, name, fresh)
    for expert in range(EXPERTS):
        load(made, expert)
    finish(made)
    assert np.allclose(output(made), 2 * first, rtol=1e-5)
