"""The loss of each token by hand-worked numbers and finite differences."""

import math

import pytest
import torch
from torch import Tensor

from rlhf_plugin_ppo.losses import value_loss
from rlhf_plugin_ppo.metrics import MOMENTS, explained_variance, of_critic
from rlhf_rollouts.ratios import clipped_gains

VALUES = torch.tensor([1.0, 1.5, 0.2, -1.0], dtype=torch.float64)
OLD = torch.tensor([1.1, 1.0, 1.0, -1.0], dtype=torch.float64)
RETURNS = torch.tensor([2.0, 3.0, 2.0, -1.5], dtype=torch.float64)


def test_the_value_loss_is_the_larger_one_of_free_and_clipped() -> None:
    loss, clipped = value_loss(VALUES, OLD, RETURNS, 0.2)
    # The second value has moved by 0.5 towards its return and counts as 1.2; the third has moved
    # away from it and keeps its own error.
    assert loss.tolist() == pytest.approx([0.5, 1.8**2 / 2, 1.8**2 / 2, 0.5**2 / 2])
    assert clipped.tolist() == [False, True, False, False]
    free, never = value_loss(VALUES, OLD, RETURNS, None)
    assert free.tolist() == pytest.approx([0.5, 1.125, 1.62, 0.125])
    assert not never.any()


def test_a_clipped_value_has_no_gradient_and_others_that_of_the_squared_error() -> None:
    def loss(values: Tensor) -> Tensor:
        return value_loss(values, OLD, RETURNS, 0.2)[0].sum()

    leaf = VALUES.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    for place in range(len(VALUES)):
        step = torch.zeros_like(VALUES)
        step[place] = 1e-6
        slope = (loss(VALUES + step) - loss(VALUES - step)).item() / 2e-6
        assert leaf.grad[place].item() == pytest.approx(slope, abs=1e-7)
    assert leaf.grad.tolist() == pytest.approx([-1.0, 0.0, -1.8, 0.5])


def test_the_smaller_one_of_both_losses_would_not_bound_the_critic() -> None:
    """The minimum lets a value that has moved towards its return move on."""
    right = value_loss(VALUES, OLD, RETURNS, 0.2)[0]
    bounded = OLD + (VALUES - OLD).clamp(-0.2, 0.2)
    wrong = torch.minimum((VALUES - RETURNS).square(), (bounded - RETURNS).square()) / 2
    assert (right - wrong).abs().max() > 0.4


def test_clipping_the_value_itself_would_depend_on_its_size() -> None:
    """Clamping V to 1 - c and 1 + c of the old one, as ratios are, is another bound."""
    right = value_loss(VALUES, OLD, RETURNS, 0.2)[0]
    bounded = torch.maximum(torch.minimum(VALUES, OLD * 1.2), OLD * 0.8)
    wrong = torch.maximum((VALUES - RETURNS).square(), (bounded - RETURNS).square()) / 2
    assert right[1] == pytest.approx(wrong[1])  # An old value of 1.
    moved = value_loss(10 * VALUES, 10 * OLD, 10 * RETURNS, 0.2)[0]
    assert abs(moved[1].item() / 100 - right[1].item()) > 0.1


def policy_gradient(logits: Tensor, old: Tensor, gains: Tensor) -> Tensor:
    """The gradient of the mean gain of a token that `old` has drawn."""
    leaf = logits.clone().requires_grad_()
    ratio = (leaf.log_softmax(0) - old).exp()
    (old.exp() * -clipped_gains(ratio, gains, low=0.2, high=0.2)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_the_policy_loss_over_a_vocabulary_of_5_has_the_gradient_of_the_mean_advantage() -> None:
    torch.manual_seed(0)
    logits, gains = torch.randn(2, 5, dtype=torch.float64)

    def mean(logits: Tensor) -> Tensor:
        return -(logits.softmax(0) * gains).sum()

    steps = 1e-6 * torch.eye(5, dtype=torch.float64)
    slopes = torch.stack([(mean(logits + step) - mean(logits - step)) / 2e-6 for step in steps])
    found = policy_gradient(logits, logits.log_softmax(0), gains)
    torch.testing.assert_close(found, slopes, atol=1e-8, rtol=1e-6)
    # A baseline, such as the critic's value of the state, changes nothing of it.
    shifted = policy_gradient(logits, logits.log_softmax(0), gains - 3)
    torch.testing.assert_close(shifted, slopes, atol=1e-8, rtol=1e-6)


def test_kl_in_the_reward_has_the_gradient_of_the_divergence_and_in_the_loss_it_has_none() -> None:
    torch.manual_seed(1)
    logits, reference = torch.randn(2, 5, dtype=torch.float64)
    reference = reference.log_softmax(0)
    old = logits.log_softmax(0)

    def kl(logits: Tensor) -> Tensor:
        logprobs = logits.log_softmax(0)
        return (logprobs.exp() * (logprobs - reference)).sum()

    steps = 1e-6 * torch.eye(5, dtype=torch.float64)
    slopes = torch.stack([(kl(logits + step) - kl(logits - step)) / 2e-6 for step in steps])
    found = policy_gradient(logits, old, -(old - reference))
    torch.testing.assert_close(found, slopes, atol=1e-8, rtol=1e-6)
    leaf = logits.clone().requires_grad_()
    (old.exp() * (leaf.log_softmax(0) - reference)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() < 1e-12


def test_the_explained_variance_is_that_of_all_tokens() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0, 9.0])
    old = torch.tensor([1.5, 2.0, 3.0, 7.0])
    zeros = torch.zeros(4)
    parts = [
        of_critic(zeros[:size], zeros[:size], old[part], returns[part])[MOMENTS]
        for size, part in ((1, slice(0, 1)), (3, slice(1, 4)))
    ]
    sums = {MOMENTS: (parts[0][0] + parts[1][0]).tolist()}  # type: ignore[index]
    expected = 1 - (returns - old).var().item() / returns.var().item()
    assert explained_variance(sums)["explained_variance"] == pytest.approx(expected)
    assert explained_variance({}) == {}
    assert explained_variance({MOMENTS: [2.0, 0.0, 0.0, 2.0, 2.0]}) == {"explained_variance": 0.0}
    assert not math.isnan(expected)
