"""The kernel of a skewed KL divergence against torch's operators, run by an interpreter without a
device."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_models import compiled_for_a_gpu

from rlhf.data.packing import blank_batch
from rlhf.model import accelerated
from rlhf.readouts import Head, logits
from rlhf_distill import Mixture, SkewedKL, WholeTeacher, divergence
from rlhf_distill.distillation import compare, compare_whole
from rlhf_kernels.kernels import TritonKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, VOCABULARY = 7, 200
MEASURES = {
    "forward": SkewedKL(forward=1.0),
    "reverse": SkewedKL(reverse=1.0),
    "both": SkewedKL(forward=0.3, reverse=0.8),
    "jsd": SkewedKL(forward=0.3, forward_skew=0.3, reverse=0.7, reverse_skew=0.7),
    "skewed forward": SkewedKL(forward=2.0, forward_skew=0.1),
    "skewed reverse": SkewedKL(reverse=1.0, reverse_skew=0.1),
    "one of two is skewed": SkewedKL(forward=1.0, forward_skew=0.2, reverse=1.0),
}
HEADS = {
    "plain": (Head(weight=torch.empty(0)), Head(weight=torch.empty(0))),
    "scaled and capped": (
        Head(weight=torch.empty(0), scale=0.5, softcap=4.0),
        Head(weight=torch.empty(0), scale=2.0, softcap=9.0),
    ),
}


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    from rlhf_kernels import divergence_triton

    monkeypatch.setattr(divergence_triton, "COLUMNS", 64)
    return divergence_triton


def both(
    measure: SkewedKL,
    heads: str = "plain",
    dtype: torch.dtype = torch.float32,
    *,
    temperature: float = 1.0,
    nll: float = 0.0,
    spread: float = 3.0,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What our kernel and torch's operators return for the same random logits."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        (spread * torch.randn(ROWS, VOCABULARY, generator=generator) + shift).to(DEVICE, dtype)
        for shift in (0.0, 5.0)
    )
    teacher[0] = student[0]
    targets = student.argmax(-1)
    targets[::2] = 3
    weights = torch.linspace(-1, 2, ROWS, device=DEVICE)
    own, known = HEADS[heads]
    options: dict[str, Any] = {
        "measure": measure, "temperature": temperature, "nll": nll, "with_gradient": True,
    }  # fmt: skip
    expected = compare(
        student.clone(), targets, weights, teacher.clone(),
        against=WholeTeacher(torch.empty(0), known).against,
        scale=own.scale, softcap=own.softcap, **options,
    )  # fmt: skip
    found = compare_whole(
        TritonKernels().compare_rows, student.clone(), targets, weights, teacher,
        scales=(own.scale, known.scale), softcaps=(own.softcap, known.softcap), **options,
    )  # fmt: skip
    return [found, expected]


def close(results: Any, loose: float = 1e-5) -> None:
    (read, gradient), (expected, wanted) = results
    torch.testing.assert_close(read, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(gradient, wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_kernel_gives_the_divergence_and_the_gradient_of_the_loss(
    name: str, heads: str
) -> None:
    close(both(MEASURES[name], heads, temperature=2.0, nll=0.3))


@pytest.mark.parametrize("name", ["forward", "jsd"])
def test_the_same_at_temperature_one_without_a_likelihood(name: str) -> None:
    close(both(MEASURES[name]))


def test_logits_in_16_bits() -> None:
    close(both(MEASURES["jsd"], dtype=torch.bfloat16, temperature=0.5, nll=0.1), loose=1e-2)


@pytest.mark.parametrize("name", MEASURES)
def test_distributions_that_share_nothing(name: str) -> None:
    results = both(MEASURES[name], spread=100.0)
    assert all(torch.isfinite(item).all() for item in results[0])
    # A last bit of a logit of 300 moves a probability by 3e-5, and that times a ratio of 256.
    close(results, loose=2e-2)


@pytest.mark.parametrize("chunk", [2, 100])
def test_a_batch_read_by_the_kernel_gives_the_loss_and_gradients_of_torchs_operators(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "round_up", lambda rows, _: -(-rows // 4) * 4)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    batch = blank_batch(torch.arange(10), ((3, (3, 4)),)).to(torch.device(DEVICE))
    num = len(batch.predict)
    weight, states, weights = random(VOCABULARY, 6), random(10, 6), random(num)
    teacher = WholeTeacher(random(num, 5), Head(weight=random(VOCABULARY, 5), scale=1.5, softcap=3))
    mixture = Mixture(MEASURES["jsd"], temperature=1.7, nll=0.2, chunk=chunk)
    results = []
    for kernels in (TritonKernels(), None):
        monkeypatch.setattr(accelerated, "kernels_on", lambda _, kernels=kernels: kernels)
        hidden, own = states.clone().requires_grad_(), weight.clone().requires_grad_()
        head = Head(weight=own, scale=0.7, softcap=5.0)
        read = divergence(hidden, head, batch, teacher=teacher, mixture=mixture, weights=weights)
        read["loss"].backward()
        results.append([*(read[name].detach() for name in read), hidden.grad, own.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "names", [("jsd",), pytest.param(tuple(MEASURES), marks=pytest.mark.matrix)], ids=str
)
def test_the_kernel_compiles_for_a_gpu(names: tuple[str, ...], tmp_path: Path) -> None:
    assert len(compiled_for_a_gpu("divergence", 90, *names, cache=tmp_path)) == 2 * len(names)


def test_without_gradient_the_logits_stay(kernel: ModuleType) -> None:
    logits = torch.randn(2, VOCABULARY, device=DEVICE)
    before = logits.clone()
    targets = torch.zeros(2, dtype=torch.long, device=DEVICE)
    weights = torch.ones(2, device=DEVICE)
    kernel.compare_rows(
        logits, logits.clone(), targets, weights, MEASURES["reverse"], temperature=1.0, nll=0.0,
        scales=(1.0, 1.0), softcaps=(None, None), with_gradient=False,
    )  # fmt: skip
    assert torch.equal(logits, before)


def test_logits_that_are_not_finite_are_not_hidden(kernel: ModuleType) -> None:
    logits = torch.zeros(3, VOCABULARY, device=DEVICE)
    logits[0, 5] = torch.nan
    read = kernel.compare_rows(
        logits, torch.zeros_like(logits), torch.zeros(3, dtype=torch.long, device=DEVICE),
        torch.ones(3, device=DEVICE), MEASURES["forward"], temperature=1.0, nll=0.0,
        scales=(1.0, 1.0), softcaps=(None, None), with_gradient=True,
    )  # fmt: skip
    assert not torch.isfinite(read[1, 0])
    assert torch.isfinite(read[:, 1:]).all()
