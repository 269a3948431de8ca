"""Layer inputs that wait on the host: the same gradients, and less that is kept."""

from typing import Any

import pytest
import torch
from families import llama, row

from rlhf.errors import RLHFError
from rlhf.memory.step_bytes import LiveBytes
from rlhf.model.kernels.offload import HostInputs, Kept
from rlhf.model.packed import PackedModel
from rlhf.model.trainable import check_recomputable, recompute
from rlhf.request.reader import read_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gradients(module: PackedModel, *batches: Any) -> dict[str, torch.Tensor]:
    module.zero_grad()
    passes = [module.packed_row(batch.to(DEVICE)) for batch in batches]
    for hidden in passes:
        hidden.square().sum().backward()
    named = module.named_parameters()
    return {name: item.grad.clone() for name, item in named if item.grad is not None}


def test_gradients_are_those_of_recomputation_bit_for_bit() -> None:
    first, second = row(90, 40, 30), row(20, 10)
    # Flex attention wants heads of at least 16.
    module = llama(hidden_size=64).train().to(DEVICE)
    recompute(module.causal, offload=False)
    expected = gradients(module, first, second)
    recompute(module.causal, offload=True)
    # Two forwards before the first backward, and once more.
    for _ in range(2):
        found = gradients(module, first, second)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), name


def two_inputs(hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (hidden * other).sin()


def test_inputs_leave_with_the_next_layer_and_come_back_once_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Kept] = []
    fetch = Kept.fetch

    def counted(kept: Kept) -> None:
        if kept.here is None:
            asked.append(kept)
        fetch(kept)

    inputs, layers = HostInputs(), []
    hidden = torch.ones(4, device=DEVICE, requires_grad=True)
    others = [torch.full((4,), float(n), device=DEVICE, requires_grad=True) for n in range(1, 4)]
    for other in others:
        hidden = inputs(two_inputs, hidden, other)
        layers.append(inputs._last())
    there = [[kept.here is not None for kept in layer.kept] for layer in layers]
    assert there == [[False] * 2, [False] * 2, [True] * 2]
    monkeypatch.setattr(Kept, "fetch", counted)
    hidden.sum().backward()
    assert len(asked) == 4, "two of the last layer never left, the others come back once"
    assert {id(kept) for kept in asked} == {id(kept) for part in layers[:2] for kept in part.kept}
    assert not any(kept.here is not None for layer in layers for kept in layer.kept)
    wanted = torch.ones(4, device=DEVICE, requires_grad=True)
    plain = wanted
    for other in others:
        plain = two_inputs(plain, other)
    expected = torch.autograd.grad(plain.sum(), others)
    for other, gradient in zip(others, expected, strict=True):
        assert torch.equal(other.grad, gradient)


def test_a_graph_that_is_kept_gives_its_gradient_again() -> None:
    inputs = HostInputs()
    first = torch.ones(4, device=DEVICE, requires_grad=True)
    other = torch.full((4,), 0.5, device=DEVICE)
    total = inputs(two_inputs, inputs(two_inputs, first, other), other).sum()
    once, again = (torch.autograd.grad(total, first, retain_graph=True) for _ in range(2))
    assert torch.equal(once[0], again[0])


def test_a_forward_without_a_backward_holds_nothing() -> None:
    inputs = HostInputs()
    hidden = torch.ones(4, device=DEVICE, requires_grad=True)
    output = inputs(two_inputs, hidden, hidden)
    assert inputs._last() is not None
    del output
    assert inputs._last() is None
    with torch.no_grad():
        inputs(two_inputs, hidden, hidden)
    assert inputs._last() is None


def test_a_rehearsal_counts_one_layer_alone() -> None:
    def kept(*, offload: bool) -> tuple[int, int]:
        with torch.device("meta"):
            module = llama().train()
        recompute(module.causal, offload=offload)
        with LiveBytes(known=list(module.parameters())) as counter:
            hidden = module.packed_row(row(90, 40, 30).to(torch.device("meta")))
            live = counter.live
            hidden.sum().backward()
        return live, module.causal.config.hidden_size

    (whole, width), (less, _) = kept(offload=False), kept(offload=True)
    # The last layer's input is the second layer's output; the first's is the embedding's.
    assert whole - less == 3 * 256 * width * 4


def test_offload_on_the_host_is_refused() -> None:
    asked = read_config("sft", overrides=["--model.recompute", "offload"], inputs=False)
    with pytest.raises(RLHFError) as caught:
        check_recomputable(asked.config.model, torch.device("cpu"))
    assert str(caught.value) == (
        "model.recompute offload moves layer inputs to host memory, but this run is on the CPU; "
        "set model.recompute to full"
    )
