"""Divergences by chunks against the plain formula over the whole vocabulary, in value and
gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.kernels import blank_batch
from rlhf.readouts import Head, logits, token_logprobs
from rlhf.trainer import PackedBatch
from rlhf_distill import Mixture, TopTeacher, WholeTeacher, distil, divergence
from rlhf_distill.distillation import COMPARED
from rlhf_distill.distributions import forward_kl

NUM, HIDDEN, TEACHER_HIDDEN, VOCABULARY = 7, 6, 5, 11


@pytest.fixture(params=[1, 16], ids=["as they are", "in blocks"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a product with a head as many as there are, or filled as on an accelerator."""
    monkeypatch.setattr(
        logits, "round_up", lambda rows, _: -(-rows // request.param) * request.param
    )


def lopsided(student: Tensor, teacher: Tensor) -> Tensor:
    """No divergence anybody uses: sensitive to every log-probability on both sides."""
    return (student.exp() * (student - teacher).square() + teacher.exp() * student).sum(-1)


def by_autograd(formula: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The measure of a formula, with autograd's own derivative."""

    def measure(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            free = student.detach().requires_grad_()
            value = formula(free, teacher)
            (slope,) = torch.autograd.grad(value.sum(), free)
        return value.detach(), slope

    return measure


def packed(num: int = NUM) -> PackedBatch:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    batch = blank_batch(tokens, ((3, (3, 4)),))
    at = torch.tensor([3, 4, 5, 6, 7, 8, 9])[:num]
    before = torch.tensor([2, 3, 4, 2, 6, 7, 8])[:num]
    return evolve(batch, predict_from=before, predict_at=at, predict=tokens[at])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def student(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((10, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    made = [drawn(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    hidden, weight, bias = (tensor.requires_grad_() for tensor in made)
    return hidden, weight, bias


def teacher(num: int = NUM) -> WholeTeacher:
    head = Head(weight=drawn(VOCABULARY, TEACHER_HIDDEN, seed=4), scale=0.5, softcap=4.0)
    return WholeTeacher(drawn(num, TEACHER_HIDDEN, seed=3), head)


def plain_loss(
    logits: Tensor,
    target: Tensor,
    batch: PackedBatch,
    mixture: Mixture,
    formula: Any,
    weights: Tensor | None = None,
) -> Tensor:
    """The sum over all predictions from whole [N, V] tensors."""
    heat = mixture.temperature
    soft = (logits / heat).log_softmax(-1)
    values = formula(soft, target) * heat**2
    logprobs = logits.log_softmax(-1).gather(-1, batch.predict[:, None])
    losses = (1 - mixture.nll) * values - mixture.nll * logprobs.squeeze(-1)
    return losses.sum() if weights is None else losses @ weights


@pytest.mark.parametrize("weights", [None, drawn(NUM, seed=5)], ids=["plain", "weighted"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"scale": 3.0, "softcap": 2.0}])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("temperature", "nll"), [(1.0, 0.0), (2.0, 0.3), (1.0, 1.0)])
def test_the_loss_and_its_gradients_are_those_of_the_plain_formula(
    options: dict[str, float],
    chunk: int,
    temperature: float,
    nll: float,
    weights: Tensor | None,
) -> None:
    batch, whole = packed(), teacher()
    mixture = Mixture(by_autograd(lopsided), temperature=temperature, nll=nll, chunk=chunk)
    found, wanted = [], []
    for results, chunked in ((found, True), (wanted, False)):
        hidden, weight, bias = student()
        head = Head(weight=weight, bias=bias, **options)
        if chunked:
            loss = divergence(hidden, head, batch, teacher=whole, mixture=mixture, weights=weights)[
                "loss"
            ]
        else:
            logits = head.logits(hidden[batch.predict_from])
            target = (whole.head.logits(whole.hidden) / temperature).log_softmax(-1)
            loss = plain_loss(logits, target, batch, mixture, lopsided, weights)
        (3 * loss).backward()
        results += [loss.detach(), hidden.grad, weight.grad, bias.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top", [1, 4, VOCABULARY - 1])
def test_the_top_tokens_and_the_tail_are_as_many_outcomes_of_both_models(top: int) -> None:
    batch, heat = packed(), 1.5
    mixture = Mixture(by_autograd(lopsided), temperature=heat, nll=0.2, chunk=2)
    whole = (teacher().head.logits(teacher().hidden) / heat).log_softmax(-1)
    order = whole.argsort(-1, descending=True)

    def outcomes(logprobs: Tensor) -> Tensor:
        ordered = logprobs.gather(-1, order)
        return torch.cat([ordered[:, :top], ordered[:, top:].logsumexp(-1, keepdim=True)], -1)

    known = TopTeacher(order[:, :top], outcomes(whole))
    found, wanted = [], []
    for results, chunked in ((found, True), (wanted, False)):
        hidden, weight, _ = student()
        head = Head(weight=weight)
        if chunked:
            loss = divergence(hidden, head, batch, teacher=known, mixture=mixture)["loss"]
        else:
            logits = head.logits(hidden[batch.predict_from])

            def coarse(student: Tensor, teacher: Tensor) -> Tensor:
                return lopsided(outcomes(student), outcomes(teacher))

            loss = plain_loss(logits, whole, batch, mixture, coarse)
        loss.backward()
        results += [loss.detach(), hidden.grad, weight.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_metrics_beside_the_loss_equal_the_plain_formula() -> None:
    batch, whole = packed(), teacher()
    hidden, weight, _ = student()
    head, heat = Head(weight=weight), 2.0
    mixture = Mixture(by_autograd(lopsided), temperature=heat, chunk=3)
    read = divergence(hidden, head, batch, teacher=whole, mixture=mixture)
    own = token_logprobs(hidden, head, batch)
    for name in ("logprobs", "entropy", "correct"):
        torch.testing.assert_close(read[name], own[name].detach())
    logits, target = head.logits(hidden[batch.predict_from]), whole.head.logits(whole.hidden)
    soft, soft_target = ((value / heat).log_softmax(-1) for value in (logits, target))
    torch.testing.assert_close(read["divergence"], lopsided(soft, soft_target).detach())
    torch.testing.assert_close(read["kl"], forward_kl(soft, soft_target).detach())
    same = (logits.argmax(-1) == target.argmax(-1)).float()
    torch.testing.assert_close(read["agreement"], same)
    assert [name for name in COMPARED if read[name].requires_grad] == []


def test_kl_worked_by_hand() -> None:
    # p = (3/4, 1/4), q = (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2 = 0.304099 - 0.173287.
    q, p = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert forward_kl(q, p).item() == pytest.approx(0.130812, abs=1e-6)


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient() -> None:
    batch = packed()
    hidden, weight, bias = student()
    head = Head(weight=weight, bias=bias, scale=2.0)
    same = WholeTeacher(
        hidden[batch.predict_from].detach(),
        Head(weight=weight.detach(), bias=bias.detach(), scale=2.0),
    )
    mixture = Mixture(by_autograd(forward_kl), temperature=1.5)
    read = divergence(hidden, head, batch, teacher=same, mixture=mixture)
    read["loss"].backward()
    assert read["loss"].item() == pytest.approx(0.0, abs=1e-6)
    assert read["agreement"].tolist() == [1.0] * NUM
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), atol=1e-5, rtol=0)


def test_nothing_to_predict_still_runs_backward_and_gives_zeros() -> None:
    hidden, weight, bias = student()
    mixture = Mixture(by_autograd(forward_kl))
    head = Head(weight=weight, bias=bias)
    read = divergence(hidden, head, packed(0), teacher=teacher(0), mixture=mixture)
    assert read["loss"].item() == 0.0
    read["loss"].backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _ = student()
    weight = weight.detach()
    mixture = Mixture(by_autograd(forward_kl))
    read = divergence(hidden, Head(weight=weight), packed(), teacher=teacher(), mixture=mixture)
    read["loss"].backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_16_bit_head_sums_its_gradient_in_float32() -> None:
    batch, whole = packed(), teacher()
    half = evolve(
        whole,
        hidden=whole.hidden.bfloat16(),
        head=evolve(whole.head, weight=whole.head.weight.bfloat16()),
    )
    gradients = []
    for dtype, known, chunk in ((torch.bfloat16, half, 1), (torch.float32, whole, 100)):
        hidden, weight, _ = student(dtype)
        mixture = Mixture(by_autograd(forward_kl), chunk=chunk)
        read = divergence(
            hidden, Head(weight=weight), batch, teacher=known, mixture=mixture,
            weights=drawn(NUM, seed=5),
        )  # fmt: skip
        assert read["loss"].dtype == torch.float32
        read["loss"].backward()
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        gradients.append(weight.grad.float())
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, Tensor):
                self.size = max(self.size, item.numel())
        return out


@pytest.mark.parametrize("top", [None, 3])
def test_no_tensor_of_predictions_times_vocabulary_is_made(
    top: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A block is larger than what is counted here.
    monkeypatch.setattr(logits, "round_up", lambda rows, _: rows)
    batch, known = packed(), teacher()
    if top is not None:
        known = TopTeacher(torch.arange(top).repeat(NUM, 1), torch.zeros(NUM, top + 1))
    hidden, weight, _ = student()
    mixture = Mixture(by_autograd(lopsided), temperature=2.0, nll=0.5, chunk=2)
    with Largest() as largest:
        read = divergence(
            hidden, Head(weight=weight), batch, teacher=known, mixture=mixture,
            weights=drawn(NUM, seed=5),
        )  # fmt: skip
        read["loss"].backward()
    assert largest.size == max(HIDDEN * VOCABULARY, 2 * VOCABULARY) < NUM * VOCABULARY


class Model:
    """An engine with hidden states of its own, whose head exists only within its forward."""

    def __init__(self, hidden: Tensor, head: Head) -> None:
        self.hidden, self.head = hidden, head
        self.open = False

    def __call__(self, batch: PackedBatch, readout: Any) -> Any:
        self.open = True
        try:
            return readout(self.hidden, self.head, batch)
        finally:
            self.open = False


def test_the_student_runs_while_the_teachers_head_is_there() -> None:
    hidden, weight, _ = student()
    large = drawn(10, TEACHER_HIDDEN, seed=3).requires_grad_()
    tutor = Model(large, teacher().head)
    pupil = Model(hidden, Head(weight=weight))
    seen = []

    def measure(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((tutor.open, pupil.open))
        return by_autograd(forward_kl)(one, other)

    read: Any = distil(pupil, tutor, packed(), Mixture(measure))  # type: ignore[arg-type]
    read["loss"].backward()
    assert seen == [(True, True)]
    assert hidden.grad is not None
    assert hidden.grad.any()
    assert large.grad is None


def test_without_gradient_none_is_computed() -> None:
    hidden, weight, _ = student()
    mixture = Mixture(by_autograd(forward_kl))
    with torch.no_grad():
        read = divergence(hidden, Head(weight=weight), packed(), teacher=teacher(), mixture=mixture)
    assert not read["loss"].requires_grad
