"""Values on the meta device: what follows from known ones is known, everything else is not."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_vision.values import META, known_values

SIZES = torch.tensor([[1, 2, 4], [1, 4, 4]])


def test_what_is_computed_of_known_values_can_be_read() -> None:
    with known_values() as move:
        sizes = move(SIZES)
        assert sizes.is_meta
        assert sizes.tolist() == SIZES.tolist()
        assert sizes.prod(-1).sum().item() == 24
        lengths = torch.repeat_interleave(sizes[:, 1] * sizes[:, 2], sizes[:, 0])
        ends = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        assert ends.is_meta
        assert ends.tolist() == [0, 8, 24]
        assert bool((sizes > 0).all())
        assert torch.tensor([3, 4], device="meta").tolist() == [3, 4]
        with torch.device("meta"):
            assert torch.tensor([3, 4]).tolist() == [3, 4]
        assert torch.arange(3, device=sizes.device).repeat(2).tolist() == [0, 1, 2, 0, 1, 2]
        assert sizes.to("cpu").device.type == "cpu"
        assert (move(torch.tensor([0.0, 2.0])) == 0).tolist() == [True, False]


def test_values_are_changed_through_views() -> None:
    with known_values() as move:
        sizes = move(SIZES)
        sizes[0, 1:] = 7
        sizes.view(-1)[-1] += 1
        assert sizes.tolist() == [[1, 7, 7], [1, 4, 5]]
    assert SIZES[0, 1] == 2


def test_a_known_mask_selects_so_many_rows_of_unknown_values() -> None:
    hidden = torch.empty(2, 3, 8, device=META, requires_grad=True)
    with known_values() as move:
        mask = move(torch.tensor([[True, False, True], [False, False, True]]))
        chosen = hidden[mask]
        assert chosen.shape == (3, 8)
        places = mask.nonzero()
        assert places.tolist() == [[0, 0], [0, 2], [1, 2]]
        changed = torch.zeros(2, 3, 8, device=META)
        changed[mask] = chosen
        placed = changed.masked_scatter(mask[..., None].expand_as(changed), chosen * 2)
        torch.autograd.backward(placed.sum())
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape


def read(tensor: Tensor) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="meta tensor"):
        tensor.tolist()


def test_other_values_cannot_be_read() -> None:
    unknown = torch.empty(2, 3, dtype=torch.int64, device=META)
    with known_values() as move:
        sizes = move(SIZES)
        read(unknown)
        read(sizes + unknown)
        read(torch.empty_like(sizes))
        # Values of a large tensor of floats are never computed.
        read(torch.zeros(2, device=META))
        view = sizes[0]
        view.copy_(unknown[0])
        read(sizes)
        assert move(SIZES).tolist() == SIZES.tolist()
