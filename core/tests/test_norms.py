"""The Triton kernels of RMS norms against the norms of transformers and autograd; Triton's
interpreter runs them where there is no accelerator."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton")
from rlhf.model.norms_triton import RMSNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(1, 5, 96), (1, 9, 4, 32), (3, 5000)]
"""Rows narrower than a tile, heads, and rows wider than one."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_their_gradients_are_those_of_transformers(
    shape: tuple[int, ...], family: type, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = family(shape[-1], eps=1e-3).to(DEVICE, dtype)
    norm.weight.data += torch.randn(shape[-1], device=DEVICE).to(dtype)
    hidden = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    gradient = torch.randn(shape, device=DEVICE).to(dtype)
    output = norm(hidden)
    expected = torch.autograd.grad(output, (hidden, norm.weight), gradient)
    offset = float(family is GemmaRMSNorm)
    found = RMSNorm.apply(hidden, norm.weight, 1e-3, offset, family is GemmaRMSNorm)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(found, output, **close)
    changes = torch.autograd.grad(found, (hidden, norm.weight), gradient)
    for change, wanted in zip(changes, expected, strict=True):
        torch.testing.assert_close(change, wanted, **close)


def test_programs_share_the_rows_of_a_long_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf.model import norms_triton

    monkeypatch.setattr(norms_triton, "PROGRAMS", 2)
    monkeypatch.setattr(norms_triton, "ELEMENTS", 64)
    torch.manual_seed(0)
    hidden = torch.randn(11, 32, device=DEVICE, requires_grad=True)
    weight = torch.randn(32, device=DEVICE, requires_grad=True)
    expected = torch.nn.functional.rms_norm(hidden, (32,), weight, 1e-6)
    found = RMSNorm.apply(hidden, weight, 1e-6, 0.0, False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    changes = torch.autograd.grad(found.square().sum(), (hidden, weight))
    torch.testing.assert_close(changes, wanted, rtol=1e-4, atol=1e-4)
