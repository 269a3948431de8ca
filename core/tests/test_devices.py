"""Values between the host and its device."""

import pytest
import torch
from torch import Tensor

from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.devices import on_device


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda")])
@pytest.mark.parametrize("values", [[1, 2], torch.tensor([1, 2])])
def test_values_are_in_page_locked_memory_before_they_are_copied_to_an_accelerator(
    values: Tensor | list[int], device: torch.device | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def pin_memory(tensor: Tensor) -> Tensor:
        calls.append("pin_memory")
        return tensor

    def to(tensor: Tensor, device: torch.device | str, *, non_blocking: bool) -> Tensor:
        calls.append(f"to {torch.device(device).type} {non_blocking}")
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    on_device(values, device)
    assert calls == ["pin_memory", "to cuda True"]
    calls.clear()
    on_device(values, torch.device("cpu"))
    assert calls == ["to cpu True"]


def test_what_models_read_of_a_batch_is_on_the_host_too() -> None:
    inputs = {
        "image_grid_thw": torch.tensor([[1, 2, 2]]).numpy(),
        "pixel_values": torch.zeros(4, 3).numpy(),
        "mm_token_type_ids": torch.tensor([0, 1, 0]).numpy(),
    }
    example = Example([1, 2], [Answer([3])], {}, inputs)
    batch = pack([example], [0])
    moved = batch.to(torch.device("meta"))
    assert all(value.is_meta for value in moved.inputs.values())
    assert moved.inputs["image_grid_thw"].host is batch.inputs["image_grid_thw"]
    again = moved.to(torch.device("meta"))
    assert again.inputs["image_grid_thw"].host is batch.inputs["image_grid_thw"]
    assert not any(hasattr(moved.inputs[name], "host") for name in inputs if name[0] != "i")
    assert not hasattr(batch.to(torch.device("cpu")).inputs["image_grid_thw"].host, "host")
