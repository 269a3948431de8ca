"""Which operations count as waits of the host for an accelerator, and which do not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_devkit.waits import Waits

HELD = torch.tensor([3, 1, 2])
"""Made before anything is watched, so it counts as on the accelerator."""
DEVICE = torch.device("cpu")

WAITING: dict[str, Callable[[], object]] = {
    "item": lambda: HELD[0].item(),
    "bool": lambda: bool((HELD > 0).all()),
    "format": lambda: f"{HELD.sum()}",
    "tolist": lambda: HELD.tolist(),
    "numpy": lambda: HELD.numpy(),
    "cpu": lambda: HELD.cpu(),
    "to the host": lambda: HELD.to("cpu"),
    "mask": lambda: HELD[HELD > 1],
    "mask of a change": lambda: HELD.clone().index_put_((HELD > 1,), HELD[:2]),
    "nonzero": lambda: (HELD > 1).nonzero(),
    "where": lambda: torch.where(HELD > 1),
    "masked_select": lambda: HELD.masked_select(HELD > 1),
    "unique": lambda: HELD.unique(),
    "equal": lambda: torch.equal(HELD, HELD),
    "repeat_interleave": lambda: HELD.repeat_interleave(HELD),
    "length": lambda: torch.arange(HELD.sum(), device=DEVICE),  # type: ignore[call-overload]
    "copy of a list": lambda: torch.tensor([1, 2], device=DEVICE),
    "blocking copy": lambda: torch.tensor([1, 2]).to(DEVICE),
    "copy into": lambda: HELD.clone().copy_(torch.tensor([1, 2, 3])),
    "moved": lambda: torch.tensor([1, 2]).to(DEVICE, non_blocking=True).tolist(),
    "computed of both": lambda: (HELD + torch.tensor([1, 2, 3])).tolist(),
    "classes": lambda: torch.nn.functional.one_hot(HELD % 1),
    "backward": lambda: gradient(lambda x: x.masked_scatter(HELD > 1, x[:2] * 2)),
}  # fmt: skip
OTHERS: dict[str, Callable[[], object]] = {
    "host": lambda: torch.tensor([1, 2]).tolist(),
    "computed on the host": lambda: [torch.arange(3)[1].item(), (torch.ones(2) * 2).sum().item()],
    "mask on the host": lambda: torch.arange(3)[torch.arange(3) > 1].tolist(),
    "numpy on the host": lambda: torch.from_numpy(np.arange(3)).tolist(),
    "device of the host": lambda: torch.ones(2, device=torch.arange(2).device).tolist(),
    "copy": lambda: torch.tensor([1, 2]).to(DEVICE, non_blocking=True) + HELD[:2],
    "places": lambda: HELD[torch.tensor([0, 2]).to(DEVICE, non_blocking=True)],
    "known length": lambda: HELD.repeat_interleave(HELD, output_size=6),
    "choice": lambda: torch.where(HELD > 1, HELD, 0),
    "filled": lambda: HELD.masked_fill(HELD > 1, 0),
    "known classes": lambda: torch.nn.functional.one_hot(HELD, 4),
    "backward": lambda: gradient(lambda x: x.index_select(0, HELD % 3) * 2),
}


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the gradient of the sum of a function of three numbers."""
    values = torch.randn(3, device=DEVICE, requires_grad=True)
    torch.autograd.backward(function(values).sum())
    return values.grad


@pytest.mark.parametrize("name", WAITING)
def test_reading_a_value_or_a_length_from_the_device_is_a_wait(name: str) -> None:
    with Waits() as waits:
        WAITING[name]()
    assert len(waits.found) == 1
    assert any("test_waits.py" in caller for caller in waits.found[0].where)


@pytest.mark.parametrize("name", OTHERS)
def test_what_stays_on_the_host_or_on_the_device_is_none(name: str) -> None:
    with Waits() as waits:
        OTHERS[name]()
    assert waits.found == []


class Known(Tensor):
    """A tensor that knows its values, also on the host."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.tolist:
            return [1, 2]
        return super().__torch_function__(func, types, args, kwargs)


def test_a_subclass_may_answer_without_the_device() -> None:
    known = HELD.as_subclass(Known)
    with Waits() as waits:
        assert known.tolist() == [1, 2]
        assert waits.found == []
        assert known[0].item() == 3
    assert len(waits.found) == 1
