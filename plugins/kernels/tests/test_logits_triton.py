"""The Triton kernels of logits against torch's operators, run by an interpreter on the host."""

from types import ModuleType
from typing import Any

import pytest
import torch

from rlhf.readouts import logits as chunks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_fused_cuda.py has these")
CASES = [(1.0, None), (0.5, None), (1.0, 4.0), (0.5, 4.0)]


def drawn(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (6 * torch.randn(7, 333)).to(dtype), torch.randint(0, 333, (7,)), torch.randn(7)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    from rlhf_kernels import logits_triton

    monkeypatch.setattr(logits_triton, "COLUMNS", 64)
    return logits_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "softcap"), CASES)
def test_the_kernels_give_the_same(
    dtype: torch.dtype, scale: float, softcap: float | None, kernels: ModuleType
) -> None:
    logits, targets, gradient = drawn(dtype)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    expected = chunks.read(logits.clone(), targets, **options)
    found = kernels.read_rows(logits.clone(), targets, scale, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted = chunks.logit_gradient(logits.clone(), targets, expected[0], gradient, **options)
    result = kernels.logit_gradient_(logits, targets, expected[0], gradient, scale, softcap)
    loose = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(result, wanted, rtol=loose, atol=loose)


def test_a_gradient_that_is_one_number_everywhere_is_read_row_by_row(kernels: ModuleType) -> None:
    logits, targets, _ = drawn()
    normaliser = logits.logsumexp(-1)
    every = torch.tensor(0.5).expand(7)
    found = kernels.logit_gradient_(logits.clone(), targets, normaliser, every, 1.0, None)
    wanted = chunks.logit_gradient(logits, targets, normaliser, every, scale=1.0, softcap=None)
    torch.testing.assert_close(found, wanted)


def test_logits_that_are_not_finite_are_not_hidden(kernels: ModuleType) -> None:
    logits, targets, _ = drawn()
    logits[0, 5], logits[1, 7] = torch.nan, torch.inf
    found = kernels.read_rows(logits, targets, 1.0, None)[1]
    assert not torch.isfinite(found[:2]).any()
    assert torch.isfinite(found[2:]).all()


def test_the_first_of_equally_likely_tokens_is_the_prediction(kernels: ModuleType) -> None:
    logits = torch.zeros(2, 200)
    logits[:, [70, 150]] = 3.0
    correct = kernels.read_rows(logits, torch.tensor([70, 150]), 1.0, None)[3]
    assert correct.tolist() == [1.0, 0.0]
