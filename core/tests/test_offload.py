"""Layer inputs that wait on the host: the same gradients, and less that is kept."""

from typing import Any

import pytest
import torch
from test_compiled import model, row

from rlhf.config.reader import read_config
from rlhf.errors import RLHFError
from rlhf.memory import LiveBytes
from rlhf.model.load import check_recomputable
from rlhf.model.offload import HostInputs
from rlhf.model.packed import PackedModel
from rlhf.model.trainable import recompute

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
    module = model(hidden_size=64).train().to(DEVICE)
    recompute(module.causal, offload=False)
    expected = gradients(module, first, second)
    recompute(module.causal, offload=True)
    # Two forwards before the first backward, and once more.
    for _ in range(2):
        found = gradients(module, first, second)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), name


def test_inputs_leave_and_come_back_in_time() -> None:
    inputs = HostInputs()
    tensors = [torch.full((4,), float(n), device=DEVICE) for n in range(3)]
    kept = [inputs.pack(tensor) for tensor in tensors]
    assert [item.here is not None for item in kept] == [False, False, True]
    for number in (2, 1, 0):
        assert torch.equal(inputs.unpack(kept[number]), tensors[number])
        before = [item.here is not None for item in kept[:number]]
        assert before == [False] * (number - 1) + [True] * bool(number)
        assert kept[number].here is None
    assert torch.equal(inputs.unpack(kept[1]), tensors[1]), "backward through a kept graph"


def test_a_whole_step_keeps_the_input_of_one_layer_on_the_device() -> None:
    module = model(hidden_size=64).train().to(DEVICE)
    recompute(module.causal, offload=True)
    hidden = module.packed_row(row(90, 40, 30).to(DEVICE))
    last = next(
        layer._gradient_checkpointing_func
        for layer in module.causal.modules()
        if hasattr(layer, "_gradient_checkpointing_func")
    )._last()
    assert last.here is not None
    assert last.before().here is None
    assert last.before().before().before() is None, "three layers"
    hidden.sum().backward()


def test_a_forward_without_a_backward_holds_nothing() -> None:
    inputs = HostInputs()
    kept = [inputs.pack(torch.zeros(4, device=DEVICE)) for _ in range(2)]
    del kept
    assert inputs._last() is None


def test_a_rehearsal_counts_one_layer_alone() -> None:
    def kept(*, offload: bool) -> tuple[int, int]:
        with torch.device("meta"):
            module = model().train()
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
    with pytest.raises(RLHFError) as told:
        check_recomputable(asked.config, torch.device("cpu"))
    assert str(told.value) == (
        "model.recompute offload keeps inputs on the host, where this run is: set model.recompute "
        "to full"
    )
