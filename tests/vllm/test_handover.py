"""What surrounds the launches of a GPU step, with the native hand-over replaced and tensors on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lvllm.vllm import handover, step


class Native:
    """Records launches; `receive` fills the output with the row numbers that it was asked for."""

    capacity_tokens = 3

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.layers: list[tuple[Any, Any]] = []
        self.failure: Exception | None = None
        self.woken = 0

    def add_layer(self, layer: Any, expert_map: Any) -> int:
        self.layers.append((layer, expert_map))
        return len(self.layers) - 1

    def send(self, *args: int) -> None:
        self.calls.append(("send", *args))

    def receive(self, *args: int) -> None:
        self.calls.append(("receive", *args))

    def check(self) -> None:
        if self.failure:
            raise self.failure

    def wake(self) -> None:
        self.woken += 1


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(handover, "_HUBS", {})
    return Native()


def enrolled(native: Native) -> handover.LayerHandover:
    hub = handover.hub_of(SimpleNamespace())  # type: ignore[arg-type]
    way = hub.enrol(
        SimpleNamespace(name="model.layers.0.mlp.experts"),  # type: ignore[arg-type]
        hidden_size=8,
        top_k=2,
        dtype=torch.bfloat16,
        max_tokens=3,
    )
    hub.attach = lambda _device: setattr(hub, "native", native) or native  # type: ignore[method-assign,assignment]
    return way


def test_a_long_step_goes_over_in_parts_of_the_capacity(native: Native) -> None:
    way = enrolled(native)
    x = torch.zeros(7, 8, dtype=torch.bfloat16)
    ids, weights = torch.zeros(7, 2, dtype=torch.int32), torch.zeros(7, 2)
    mask = torch.zeros(7, dtype=torch.bool)
    out = way.forward(x, weights, ids, torch.tensor([1, -1, 0]), mask)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert [(layer.name, local) for layer, local in native.layers] == [
        ("model.layers.0.mlp.experts", [1, -1, 0])
    ]
    expected = []
    for first, count in ((0, 3), (3, 3), (6, 1)):
        padding = mask.data_ptr() + first
        expected += [
            (
                "send",
                0,
                77,
                x.data_ptr() + first * 16,
                ids.data_ptr() + first * 8,
                weights.data_ptr() + first * 8,
                count,
                padding,
            ),
            ("receive", 0, 77, out.data_ptr() + first * 16, count, padding),
        ]
    assert native.calls == expected


def test_a_profile_run_makes_the_slots_and_computes_nothing(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = enrolled(native)
    layer: Any = SimpleNamespace(
        quant_method=SimpleNamespace(host=SimpleNamespace(handover=way)), _expert_map=None
    )
    x, ids = torch.ones(2, 8), torch.zeros(2, 2, dtype=torch.int32)
    context = SimpleNamespace(attn_metadata=None, slot_mapping={}, is_padding=None)
    out = step.run_on_gpu(context, layer, x, torch.zeros(2, 2), ids)
    assert not out.any()
    assert native.calls == []
    assert way.number == 0
    # A piecewise graph is captured without attention metadata too, and what is captured must compute.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step.run_on_gpu(context, layer, x, torch.zeros(2, 2), ids)
    assert [call[0] for call in native.calls] == ["send", "receive"]


def test_a_capture_before_the_first_run_is_an_error(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    way = enrolled(native)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.mlp\.experts: captured before it ever ran"):
        way.ready(torch.device("cpu"), None)


def test_padding_comes_from_the_mask_else_from_the_slots(native: Native) -> None:
    mask = torch.tensor([False, True])
    context = SimpleNamespace(is_padding=mask, slot_mapping={})
    assert handover.padding_of(context, 2) is mask
    # Rows gathered from other ranks are not the mask's rows.
    assert handover.padding_of(context, 4) is None
    slots = {"layer": torch.tensor([5, -1, -1])}
    found = handover.padding_of(SimpleNamespace(is_padding=None, slot_mapping=slots), 3)
    assert found is not None
    assert found.tolist() == [False, True, True]
    assert handover.padding_of(SimpleNamespace(slot_mapping=[slots]), 3) is None


def test_a_failure_is_raised_before_a_step_and_before_its_tokens_leave(native: Native) -> None:
    enrolled(native).ready(torch.device("cpu"), None)
    answers = iter(["eager", SimpleNamespace(get_output=lambda: "tokens"), None])
    run = handover._checked_step(lambda _self, _scheduled: next(answers))
    assert run(None, None) == "eager"
    assert native.woken == 1
    late = run(None, None)
    assert late.get_output() == "tokens"
    native.failure = RuntimeError("worker 3 failed")
    with pytest.raises(RuntimeError, match="worker 3"):
        late.get_output()
    with pytest.raises(RuntimeError, match="worker 3"):
        run(None, None)
    assert next(answers) is None, "the step ran although the engine had failed"
