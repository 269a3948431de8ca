"""The Triton kernels of short convolutions along paths against torch's own, run by an interpreter
on the host."""

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_models import compiled_for_a_gpu
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from rlhf.data.packing import blank_batch
from rlhf.model.masks import Tree
from rlhf_kernels.recurrent import Segments
from rlhf_kernels.scans import Scans

SPANS = ((3, (2, 4, 1)), (2, (5,)), (0, (1, 2)), (1, (3, 30)), (40, (1, 1)))
"""Prompts and answers shorter than a convolution's width and longer than a program's rows; a chain
of one answer, answers without a prompt, and tokens that round the row up."""
TOKENS = 104
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    from rlhf_kernels import convolution_triton

    # Several programs for the channels, and several tiles for each partial sum.
    monkeypatch.setattr(convolution_triton, "CHANNELS", 16)
    monkeypatch.setattr(convolution_triton, "TILE_CHANNELS", 16)
    monkeypatch.setattr(convolution_triton, "PROGRAMS", 3)
    return convolution_triton


def segments() -> Segments:
    batch = blank_batch(torch.zeros(TOKENS, dtype=torch.long, device=DEVICE), SPANS)
    return Segments(Tree(batch), Scans())


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, row: Segments
) -> Tensor:
    """The convolution [1, C, T] by torch, in float32, of one path after another."""
    parts = []
    width = weight.shape[1]
    for tokens, parent in row.segments:
        before = () if parent is None else row.segments[parent].tokens[1 - width :]
        path = x[0][:, [*before, *tokens]].float()
        path = pad(path, (width - 1 - len(before), 0))
        parts.append(conv1d(path, weight.float()[:, None], groups=len(weight)))
    found = torch.cat(parts, 1)[None]
    if bias is not None:
        found = found + bias.float()[:, None]
    return silu(found) if activation else found


def drawn(width: int, *, bias: bool, dtype: torch.dtype, first: bool) -> list[Tensor | None]:
    """Hidden states [1, C, T], of which tokens or channels lie together in memory, weight and
    bias."""
    torch.manual_seed(0)
    shape = (TOKENS, 2, 20) if first else (20, 2, TOKENS)
    whole = torch.randn(shape, device=DEVICE, dtype=dtype)[:, 1]
    whole = whole.mT if first else whole
    weight = torch.randn(20, width, device=DEVICE, dtype=dtype)
    return [whole[None], weight, torch.randn(20, device=DEVICE, dtype=dtype) if bias else None]


def differentiated(run: Any, given: list[Tensor | None]) -> list[Tensor]:
    """The result and the gradients of a weighted sum of it."""
    leaves = [None if one is None else one.detach().requires_grad_() for one in given]
    result = run(*leaves)
    generator = torch.Generator(DEVICE).manual_seed(1)
    factors = torch.randn(result.shape, generator=generator, device=DEVICE)
    (result.float() * factors).sum().backward()
    return [result.detach().float(), *(one.grad.float() for one in leaves if one is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["channels together", "tokens together"])
@pytest.mark.parametrize(
    ("width", "bias", "activation"), [(4, False, "silu"), (2, True, "silu"), (3, True, None)]
)
def test_the_kernels_give_the_same(
    width: int, bias: bool, activation: str | None, first: bool, dtype: Any, kernels: ModuleType
) -> None:
    given, row = drawn(width, bias=bias, dtype=dtype, first=first), segments()
    run = partial(kernels.convolve, activation=activation, links=row.links(width - 1))
    found = differentiated(run, given)
    wanted = differentiated(partial(by_torch, activation=activation, row=row), given)
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < loose * other.norm()


def test_without_links_a_row_is_one_path(kernels: ModuleType) -> None:
    given = drawn(4, bias=True, dtype=torch.float32, first=True)
    whole = Segments(Tree(blank_batch(torch.zeros(TOKENS, dtype=torch.long), ())), Scans())
    found = differentiated(partial(kernels.convolve, activation="silu"), given)
    wanted = differentiated(partial(by_torch, activation="silu", row=whole), given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_gradient_whose_channels_do_not_lie_together_is_read(kernels: ModuleType) -> None:
    hidden, weight, _ = drawn(4, bias=False, dtype=torch.float32, first=True)
    links = segments().links(3)
    results = []
    for order in (lambda one: one, lambda one: one.mT.contiguous().mT):
        x = hidden.detach().requires_grad_()
        output = kernels.convolve(x, weight, links=links)
        output.backward(order(torch.arange(output.numel()).view_as(output).to(output)))
        results.append(x.grad)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert len(compiled_for_a_gpu("convolution", 90, cache=tmp_path)) == 6


@pytest.mark.parametrize(
    ("width", "activation", "what"), [(4, "gelu", "activation gelu"), (5, "silu", "width 5")]
)
def test_what_no_kernel_computes_is_refused(
    width: int, activation: str, what: str, kernels: ModuleType
) -> None:
    with pytest.raises(ValueError, match=f"no kernel has the {what}"):
        kernels.convolve(torch.zeros(1, 2, 3), torch.zeros(2, width), activation=activation)
