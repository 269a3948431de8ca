"""Advantages by hand-worked numbers, and what other trainers do instead."""

import numpy as np
import pytest

from rlhf_plugin_ppo.advantages import adapted, gae, matrix_of, token_rewards, whitened

NAN = np.nan
VALUES = np.array([[0.5, 1.0, 2.0]])
REWARDS = np.array([[0.0, -1.0, 3.0]])


def test_advantages_of_three_tokens_by_hand() -> None:
    found = gae(REWARDS, VALUES, gamma=0.5, lambda_=0.5)
    # The errors are 0.5 * 1 - 0.5 = 0, -1 + 0.5 * 2 - 1 = -1 and 3 - 2 = 1.
    third, second = 1.0, -1 + 0.25 * 1.0
    assert found.tolist() == [[0 + 0.25 * second, second, third]]


def test_lambda_1_is_the_return_minus_the_value_and_0_the_error_of_one_token() -> None:
    found = gae(REWARDS, VALUES, gamma=1.0, lambda_=1.0)
    assert found.tolist() == [[2.0 - 0.5, 2.0 - 1.0, 3.0 - 2.0]]
    found = gae(REWARDS, VALUES, gamma=1.0, lambda_=0.0)
    assert found.tolist() == [[1.0 - 0.5, -1 + 2.0 - 1.0, 3.0 - 2.0]]


def test_a_critic_of_0_gives_the_return_to_go() -> None:
    found = gae(REWARDS, 0 * VALUES, gamma=0.9, lambda_=1.0)
    np.testing.assert_allclose(found, [[0.9 * -1 + 0.81 * 3, -1 + 0.9 * 3, 3]], rtol=1e-15)


def test_tokens_of_a_tool_are_skipped_as_if_they_were_not_there() -> None:
    gap = np.array([[0.5, NAN, NAN, 1.0, 2.0]])
    rewards = np.array([[0.0, NAN, NAN, -1.0, 3.0]])
    found = gae(rewards, gap, gamma=0.5, lambda_=0.5)
    assert np.isnan(found[0, 1:3]).all()
    expected = gae(REWARDS, VALUES, gamma=0.5, lambda_=0.5)
    assert found[0, [0, 3, 4]].tolist() == expected[0].tolist()


def test_a_value_of_0_in_a_gap_would_be_another_number() -> None:
    """OpenRLHF 0.11 multiplies values and rewards by the mask."""
    zeroed = gae(
        np.array([[0.0, 0.0, 0.0, -1.0, 3.0]]), np.array([[0.5, 0.0, 0.0, 1.0, 2.0]]),
        gamma=0.5, lambda_=0.5,
    )  # fmt: skip
    right = gae(REWARDS, VALUES, gamma=0.5, lambda_=0.5)
    assert abs(zeroed[0, 0] - right[0, 0]) > 0.2


def test_answers_of_other_lengths_do_not_change_an_answer() -> None:
    rewards = matrix_of([[REWARDS[0]], [[1.0]], [[0.0, 0.0, 0.0, 0.0, 2.0]]])
    values = matrix_of([[VALUES[0]], [[0.25]], [[0.1, 0.2, 0.3, 0.4, 0.5]]])
    found = gae(rewards, values, gamma=0.9, lambda_=0.8)
    assert found[0, :3].tolist() == gae(REWARDS, VALUES, gamma=0.9, lambda_=0.8)[0].tolist()
    assert np.isnan(found[0, 3:]).all()
    assert found[1, 0] == 0.75


def test_the_score_is_the_reward_of_the_last_predicted_token() -> None:
    log_ratios = np.array([[0.1, 0.2, NAN, 0.4, NAN], [0.5, NAN, NAN, NAN, NAN], [NAN] * 5])
    found = token_rewards(np.array([2.0, 3.0, NAN]), log_ratios, 0.5)
    expected = [[-0.05, -0.1, NAN, 1.8, NAN], [2.75, NAN, NAN, NAN, NAN], [NAN] * 5]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_advantages_are_whitened_over_all_tokens_of_the_rollout() -> None:
    values = np.array([[1.0, 2.0, NAN], [6.0, NAN, NAN]])
    found = whitened(values)
    np.testing.assert_allclose(found, (values - 3) / np.sqrt(14 / 3), rtol=1e-8)
    only_scaled = whitened(values, shift=False)
    np.testing.assert_allclose(only_scaled, values / np.sqrt(14 / 3), rtol=1e-8)


def test_whitening_of_each_answer_or_with_padding_would_be_another_number() -> None:
    values = np.array([[1.0, 2.0, NAN], [6.0, 7.0, 9.0]])
    right = whitened(values)
    of_micro_batches = np.stack([whitened(row) for row in values])
    # trlX 2024-01 takes mean and variance over padding too.
    of_padding = whitened(np.nan_to_num(values))
    for wrong in (of_micro_batches, of_padding):
        assert np.nanmax(np.abs(wrong - right)) > 0.1


def test_returns_are_not_those_of_whitened_advantages() -> None:
    """A critic that learns whitened advantages plus values does not learn returns (SkyRL #773)."""
    advantages = gae(REWARDS, VALUES, gamma=1.0, lambda_=1.0)
    assert (advantages + VALUES).tolist() == [[2.0, 2.0, 3.0]]
    assert np.abs(whitened(advantages) + VALUES - (advantages + VALUES)).max() > 0.5


@pytest.mark.parametrize(("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98)])
def test_the_coefficient_moves_to_the_target_by_a_bounded_share(kl: float, factor: float) -> None:
    found = adapted(0.2, kl, target=6.0, horizon=10000, answers=1000)
    assert found == pytest.approx(0.2 * factor, rel=1e-12)
