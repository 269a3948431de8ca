"""Log-probabilities by chunks against the plain formula, in value and gradient."""

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.packing import blank_batch
from rlhf.model.head import Head
from rlhf.readouts import (
    answer_logprobs,
    hidden_at,
    logits,
    summed_logprobs,
    token_logprobs,
)

HIDDEN, VOCABULARY = 6, 11


@pytest.fixture(params=[1, 16], ids=["as they are", "in blocks"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a product with the head as many as there are, or filled as on an accelerator."""
    monkeypatch.setattr(
        logits, "round_up", lambda rows, _: -(-rows // request.param) * request.param
    )


def packed(num_predictions: int = 7) -> PackedBatch:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    batch = blank_batch(tokens, ((3, (3, 4)),))
    before = torch.tensor([2, 3, 4, 2, 6, 7, 8])[:num_predictions]
    at = torch.tensor([3, 4, 5, 6, 7, 8, 9])[:num_predictions]
    return evolve(
        batch,
        predict_from=before,
        predict_at=at,
        predict=tokens[at],
        answer=torch.tensor([0, 0, 0, 1, 1, 1, 1])[:num_predictions],
        answer_example=torch.tensor([0, 0]),
        answer_end=torch.tensor([5, 9]),
    )


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((10, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    )
    return hidden, weight, bias


def plain(hidden: Tensor, head: Head, batch: PackedBatch, temperature: float) -> Tensor:
    logits = head.logits(hidden[batch.predict_from]) / temperature
    return logits.log_softmax(-1)


HEADS = [
    {},
    {"scale": 0.25},
    {"softcap": 1.5},
    {"scale": 3.0, "softcap": 2.0},
]


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_are_those_of_the_plain_formula(
    options: dict[str, float], chunk: int, temperature: float
) -> None:
    batch, weights = packed(), torch.linspace(-1, 2, 7)
    found, wanted = [], []
    for results, chunked in ((found, True), (wanted, False)):
        hidden, weight, bias = inputs(torch.float32)
        head = Head(weight=weight, bias=bias, **options)
        if chunked:
            read = token_logprobs(hidden, head, batch, chunk=chunk, temperature=temperature)
            logprobs = read["logprobs"]
        else:
            full = plain(hidden, head, batch, temperature)
            logprobs = full.gather(-1, batch.predict[:, None]).squeeze(-1)
        (logprobs * weights).sum().backward()
        results += [logprobs.detach(), hidden.grad, weight.grad, bias.grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_entropy_and_agreement_are_computed_without_gradient() -> None:
    hidden, weight, _ = inputs(torch.float32)
    head, batch = Head(weight=weight), packed()
    read = token_logprobs(hidden, head, batch, chunk=2)
    full = plain(hidden, head, batch, 1.0)
    torch.testing.assert_close(read["entropy"], -(full.exp() * full).sum(-1))
    torch.testing.assert_close(read["correct"], (full.argmax(-1) == batch.predict).float())
    assert not read["entropy"].requires_grad
    assert not read["correct"].requires_grad


def test_nothing_to_predict_still_runs_backward_and_gives_zeros() -> None:
    hidden, weight, bias = inputs(torch.float32)
    read = token_logprobs(hidden, Head(weight=weight, bias=bias), packed(0))
    assert read["logprobs"].shape == (0,)
    read["logprobs"].sum().backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _ = inputs(torch.float32)
    weight = weight.detach()
    token_logprobs(hidden, Head(weight=weight), packed())["logprobs"].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_16_bit_head_sums_its_gradient_in_float32() -> None:
    batch = packed()
    hidden, weight, _ = inputs(torch.bfloat16)
    token_logprobs(hidden, Head(weight=weight), batch, chunk=1)["logprobs"].sum().backward()
    exact_hidden, exact_weight, _ = inputs(torch.bfloat16)
    head = Head(weight=exact_weight.float())
    full = plain(exact_hidden.float(), head, batch, 1.0)
    full.gather(-1, batch.predict[:, None]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad, exact_weight.grad, rtol=2e-2, atol=2e-2)


def test_an_answers_logprob_is_the_sum_over_its_tokens() -> None:
    hidden, weight, _ = inputs(torch.float32)
    read = answer_logprobs(hidden, Head(weight=weight), packed(), chunk=2)
    tokens = read["tokens/logprobs"]
    torch.testing.assert_close(read["logprobs"], torch.stack((tokens[:3].sum(), tokens[3:].sum())))


def test_hidden_states_are_read_at_the_requested_positions() -> None:
    hidden, weight, _ = inputs(torch.float32)
    read = hidden_at(torch.tensor([9, 0]))(hidden, Head(weight=weight), packed())
    torch.testing.assert_close(read["hidden"], hidden[[9, 0]])


@pytest.mark.parametrize("options", HEADS)
def test_a_sum_has_the_gradient_of_its_parts_and_reads_the_same(options: dict[str, float]) -> None:
    def run(readout: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
        hidden, weight, bias = inputs(torch.float32)
        found = readout(hidden, Head(weight=weight, bias=bias, **options), packed())
        total = found["sum"] if "sum" in found else found["logprobs"].sum()
        gradients = torch.autograd.grad(-0.3 * total, (hidden, weight, bias))
        return found | {"sum": total}, list(gradients)

    expected, wanted = run(token_logprobs)
    found, actual = run(summed_logprobs)
    for name in ("sum", "logprobs", "entropy", "correct"):
        torch.testing.assert_close(found[name], expected[name].detach())
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_sum_of_nothing_is_zero_with_zero_gradients() -> None:
    hidden, weight, _ = inputs(torch.float32)
    total = summed_logprobs(hidden, Head(weight=weight), packed(0))["sum"]
    assert float(total.detach()) == 0
    assert not torch.autograd.grad(total, weight)[0].any()


def test_a_sum_without_a_gradient_computes_none() -> None:
    hidden, weight, bias = inputs(torch.float32)
    with torch.no_grad():
        found = summed_logprobs(hidden, Head(weight=weight, bias=bias), packed())
    assert not found["sum"].requires_grad


def test_a_sum_of_many_predictions_in_fp16_has_the_gradient_of_its_mean() -> None:
    torch.manual_seed(0)
    num = 6_000
    hidden = torch.full((num, HIDDEN), 20.0).half().requires_grad_()
    weight = (0.01 * torch.randn(VOCABULARY, HIDDEN)).half().requires_grad_()
    rows, targets = torch.arange(num), torch.zeros(num, dtype=torch.long)
    batch = evolve(packed(), predict_from=rows, predict=targets)
    total = summed_logprobs(hidden, Head(weight=weight), batch)["sum"]
    found = torch.autograd.grad(-total / num, (hidden, weight))
    exact = [item.detach().float().requires_grad_() for item in (hidden, weight)]
    logprobs = (exact[0] @ exact[1].T).log_softmax(-1)[:, 0]
    # Before it is divided, the sum over all predictions is beyond what fp16 holds.
    assert float(torch.autograd.grad(logprobs.sum(), exact, retain_graph=True)[1].max()) > 65_504
    expected = torch.autograd.grad(-logprobs.mean(), exact)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-3)
