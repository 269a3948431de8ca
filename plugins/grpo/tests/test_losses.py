"""The loss of each token by hand-worked numbers, finite differences, and over a vocabulary of 5."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_plugin_grpo.config import Clip
from rlhf_plugin_grpo.losses import (
    divergence,
    mean_per_answer,
    ratios,
    surrogate,
)
from rlhf_plugin_grpo.presets import Method
from rlhf_rollouts.ratios import corrections, sampling_ratios
from rlhf_rollouts.settings import Correction

ANSWER = torch.tensor([0, 0, 0, 2, 2])
"""Three predictions of the first answer, none of the second, two of the third."""
OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1], dtype=torch.float64)
NOW = torch.tensor([-0.7, -2.1, -0.5, -2.0, -0.6], dtype=torch.float64)
GAINS = torch.tensor([1.5, 1.5, 1.5, -2.0, -2.0], dtype=torch.float64)


def of(clip: Clip | None = None, ratio: str = "token", **settings: object) -> Tensor:
    method = Method(**settings)  # type: ignore[arg-type]

    def loss(logprobs: Tensor) -> Tensor:
        ratio_now = ratios(logprobs, OLD, ANSWER, 3, of=ratio)
        return surrogate(ratio_now, logprobs, GAINS, method, clip or Clip())

    logprobs = NOW.clone().requires_grad_()
    value = loss(logprobs)
    value.sum().backward()
    gradient = logprobs.grad
    assert gradient is not None
    if method.clip_kind != "cispo":  # Its weight is a constant.
        for place in range(len(NOW)):
            step = torch.zeros_like(NOW)
            step[place] = 1e-6
            slope = (loss(NOW + step).sum() - loss(NOW - step).sum()) / 2e-6
            assert gradient[place].item() == pytest.approx(slope.item(), abs=1e-7)
    return torch.stack([value.detach(), gradient])


def test_the_clipped_gain_is_the_smaller_one() -> None:
    value, gradient = of(clip_low=0.2, clip_high=0.28)
    expected = [-1.28 * 1.5, -math.exp(-0.1) * 1.5, -1.5, 2 * math.e, 2 * 0.8]
    assert value.tolist() == pytest.approx(expected)
    # Where the clipped gain is the smaller one, nothing moves.
    assert gradient.tolist() == pytest.approx([0.0, expected[1], expected[2], expected[3], 0.0])


def test_the_dual_clip_bounds_the_loss_of_a_bad_answer() -> None:
    value, gradient = of(Clip(dual=1.5), clip_low=0.2, clip_high=0.28)
    assert value.tolist()[3:] == pytest.approx([2 * 1.5, 2 * 0.8])
    assert gradient.tolist()[3:] == [0.0, 0.0]
    assert value.tolist()[:3] == of(clip_low=0.2, clip_high=0.28)[0].tolist()[:3]


def test_the_ratio_of_a_sequence_is_the_mean_over_its_tokens() -> None:
    value, gradient = of(ratio="sequence", clip_kind="none")
    first, last = math.exp(0.2 / 3), math.exp(0.25)
    assert value.tolist() == pytest.approx([-1.5 * first] * 3 + [2 * last] * 2)
    # All tokens of an answer have the same gradient.
    assert gradient.tolist() == pytest.approx([-1.5 * first] * 3 + [2 * last] * 2)


def test_gspo_clips_whole_answers() -> None:
    value, gradient = of(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    assert value.tolist() == pytest.approx([-1.5 * 1.0004] * 3 + [2 * math.exp(0.25)] * 2)
    assert gradient.tolist() == pytest.approx([0.0] * 3 + [2 * math.exp(0.25)] * 2)


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    value, gradient = of(clip_kind="cispo", clip_high=0.28)
    weights = [1.28, math.exp(-0.1), 1.0, 1.28, math.exp(-0.5)]
    expected = [-weight * gain for weight, gain in zip(weights, GAINS.tolist(), strict=True)]
    assert gradient.tolist() == pytest.approx(expected)
    assert value.tolist() == pytest.approx(
        [g * p for g, p in zip(expected, NOW.tolist(), strict=True)]
    )


def test_at_the_first_update_all_kinds_have_the_gradient_of_reinforce() -> None:
    for kind in ("ppo", "cispo", "none"):
        logprobs = NOW.clone().requires_grad_()
        ratio = ratios(logprobs, NOW, ANSWER, 3, of="token")
        method = Method(clip_kind=kind)  # type: ignore[arg-type]
        surrogate(ratio, logprobs, GAINS, method, Clip()).sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx((-GAINS).tolist())


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """The logits of a policy over 5 tokens, and the log-probabilities under another policy that
    wrote the answers and under the reference."""
    torch.manual_seed(0)
    policy, old, reference = torch.randn(3, 5, dtype=torch.float64)
    return policy, old.log_softmax(0), reference.log_softmax(0)


def true_gradient(logits: Tensor, reference: Tensor) -> Tensor:
    """The gradient of KL(policy || reference) by finite differences."""

    def kl(logits: Tensor) -> Tensor:
        logprobs = logits.log_softmax(0)
        return (logprobs.exp() * (logprobs - reference)).sum()

    steps = 1e-6 * torch.eye(5, dtype=torch.float64)
    return torch.stack([(kl(logits + step) - kl(logits - step)) / 2e-6 for step in steps])


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_has_the_gradient_of_the_divergence(estimator: str, on_policy: bool) -> None:
    logits, old, reference = distributions()
    old = logits.log_softmax(0) if on_policy else old
    leaf = logits.clone().requires_grad_()
    addends = divergence(leaf.log_softmax(0), old, reference, estimator)
    (old.exp() * addends).sum().backward()
    torch.testing.assert_close(leaf.grad, true_gradient(logits, reference), atol=1e-8, rtol=1e-6)
    if estimator == "k3":
        logprobs = logits.log_softmax(0)
        kl = (logprobs.exp() * (logprobs - reference)).sum()
        assert (old.exp() * addends).sum().item() == pytest.approx(kl.item())


def test_answers_of_older_weights_give_that_gradient_with_their_correction() -> None:
    logits, old, reference = distributions()
    drawn = (0.5 * old + 0.3 * reference).log_softmax(0)
    leaf = logits.clone().requires_grad_()
    addends = divergence(leaf.log_softmax(0), old, reference, "k3")
    each = torch.arange(5)
    weights = corrections(old, drawn, Correction(high=1e6), each, 5)
    (drawn.exp() * weights * addends).sum().backward()
    torch.testing.assert_close(leaf.grad, true_gradient(logits, reference), atol=1e-8, rtol=1e-6)


def test_k1_and_k3_by_themselves_have_other_gradients() -> None:
    logits, _, reference = distributions()
    right = true_gradient(logits, reference)
    for wrong in (lambda d: d, lambda d: torch.exp(-d) - 1 + d):
        leaf = logits.clone().requires_grad_()
        logprobs = leaf.log_softmax(0)
        (logprobs.detach().exp() * wrong(logprobs - reference)).sum().backward()
        assert leaf.grad is not None
        assert (leaf.grad - right).abs().max() > 0.05


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_token_far_from_the_reference_keeps_its_gradient(estimator: str) -> None:
    # Trainers that clamp the difference or the estimate let such tokens go.
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-31.0, -61.0], dtype=torch.float64)
    divergence(logprobs, logprobs.detach(), reference, estimator).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([30.0, 60.0])


def test_the_weights_of_a_correction_are_bounded_or_masked() -> None:
    drawn = OLD - torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    raw = [1.0, math.e, 1 / math.e, math.exp(0.5), math.exp(-0.5)]
    assert weights_of(drawn, kind="none") == [1.0] * 5
    assert weights_of(drawn) == pytest.approx([min(value, 2.0) for value in raw])
    assert weights_of(drawn, kind="mask") == pytest.approx([1.0, 0.0, 0.0, raw[3], raw[4]])
    assert weights_of(drawn, kind="mask", low=0) == pytest.approx([1.0, 0.0, *raw[2:]])


def test_the_correction_of_an_answer_is_the_ratio_of_its_whole_probability() -> None:
    """sequence_truncate and sequence_mask of TRL: exp of the sum, not of the mean."""
    drawn = OLD - torch.tensor([0.5, 1.0, -0.75, -0.5, 0.25], dtype=torch.float64)
    first, third = math.exp(0.75), math.exp(-0.25)  # 2.117 and 0.779
    sequence: Any = {"level": "sequence"}
    assert weights_of(drawn, **sequence) == pytest.approx([2.0] * 3 + [third] * 2)
    assert weights_of(drawn, **sequence, high=3) == pytest.approx([first] * 3 + [third] * 2)
    assert weights_of(drawn, **sequence, kind="mask") == pytest.approx([0.0] * 3 + [third] * 2)
    narrow = {"kind": "mask", "high": 3, "low": 0.8}
    assert weights_of(drawn, **sequence, **narrow) == pytest.approx([first] * 3 + [0.0] * 2)


def test_the_ratio_of_a_long_answer_stays_finite() -> None:
    old, drawn, answer = torch.full([1000], -0.1), torch.full([1000], -0.3), torch.zeros(1000).int()
    settings = Correction(kind="mask", level="sequence")
    assert sampling_ratios(old, drawn, answer, 1, level="sequence").max() == math.exp(20)
    assert corrections(old, drawn, settings, answer, 1).tolist() == [0.0] * 1000
    back = sampling_ratios(drawn, old, answer, 1, level="sequence")
    assert back.tolist() == [0.0] * 1000


def weights_of(drawn: Tensor, **settings: Any) -> list[float]:
    return corrections(OLD, drawn, Correction(**settings), ANSWER, 3).tolist()


def test_the_mean_of_an_answer_without_predictions_is_0() -> None:
    found = mean_per_answer(GAINS * torch.arange(5), ANSWER, 3)
    assert found.tolist() == pytest.approx([1.5, 0.0, -7.0])
