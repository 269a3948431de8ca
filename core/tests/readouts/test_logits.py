"""Values and gradients of logits by torch's operators, against autograd."""

from typing import Any

import pytest
import torch

from rlhf.readouts import chunked
from rlhf.readouts import logits as chunks

CASES = [(1.0, None), (0.5, None), (1.0, 4.0), (0.5, 4.0)]


def drawn(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (6 * torch.randn(7, 333)).to(dtype), torch.randint(0, 333, (7,)), torch.randn(7)


@pytest.mark.parametrize(("scale", "softcap"), CASES)
def test_values_and_gradients_are_those_of_autograd(scale: float, softcap: float | None) -> None:
    logits, targets, gradient = drawn(torch.float64)
    leaf = logits.clone().requires_grad_()
    values = leaf * scale if softcap is None else softcap * torch.tanh(leaf * scale / softcap)
    logprobs = values.log_softmax(-1)
    picked = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    (expected,) = torch.autograd.grad((picked * gradient).sum(), leaf)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    read = chunks.read(logits.float(), targets, **options)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    correct = (values.argmax(-1) == targets).float()
    for found, wanted in zip(read[1:], (picked, entropy, correct), strict=True):
        torch.testing.assert_close(found, wanted.detach().float(), rtol=1e-5, atol=1e-5)
    result = chunks.logit_gradient(logits.float(), targets, read[0], gradient, **options)
    torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=1e-6)


def test_where_kernels_are_fused_products_have_whole_blocks_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, sizes = torch.device("meta"), (0, 1, 256, 257)
    for fused, expected in ((True, [0, 256, 256, 512]), (False, list(sizes))):
        monkeypatch.setattr(chunks, "fused_on", lambda kind, fused=fused: fused)
        assert [chunks.round_up(rows, device) for rows in sizes] == expected


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_rows_are_padded_with_zeros(shape: tuple[int, ...]) -> None:
    padded = chunks.pad_rows(torch.ones(shape), 4)
    assert padded.shape == (4, *shape[1:])
    assert torch.equal(padded.reshape(4, -1).sum(1) > 0, torch.tensor([True, True, False, False]))


def test_a_sum_of_products_is_rehearsed_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no product of 16 bits added to 32 on the meta device."""
    monkeypatch.setattr(chunked, "fused_on", lambda kind: True)
    monkeypatch.delattr(torch, "addmm")
    half = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    chunked.add_product(torch.empty(2, 2, device="meta"), half, half.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added(dtype: torch.dtype) -> None:
    left, right = torch.tensor([[1.0, 2.0]]).to(dtype), torch.tensor([[3.0], [4.0]]).to(dtype)
    total = torch.tensor([[0.25]])
    chunked.add_product(total, left, right)
    assert total.tolist() == [[11.25]]
