"""Advantages by hand-worked numbers, and what is wrong in other trainers."""

import numpy as np
import pytest

from rlhf_plugin_grpo.advantages import EPSILON, advantages, alike, decoupled, deviations, overlong

NAN = np.nan
GROUPS = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, NAN, 3.0, NAN]])
SPREADS = [np.sqrt(1 / 3), 0.0, np.sqrt(4.5)]


def test_the_mean_of_a_group_is_that_of_its_scored_answers() -> None:
    found = advantages(GROUPS, "mean", "none")
    expected = [[0.5, -0.5, -0.5, 0.5], [0.0] * 4, [-1.5, 0.0, 1.5, 0.0]]
    assert found.tolist() == expected
    assert np.abs(found.sum(1)).max() == 0


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    found = advantages(GROUPS, "leave_one_out", "none")
    third = 1 / 3
    expected = [[2 * third, -2 * third, -2 * third, 2 * third], [0.0] * 4, [-3.0, 0.0, 3.0, 0.0]]
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_without_a_baseline_advantages_are_rewards_and_0_without_a_score() -> None:
    assert advantages(GROUPS, "none", "none").tolist() == np.nan_to_num(GROUPS).tolist()


def test_a_group_is_divided_by_its_own_deviation() -> None:
    np.testing.assert_allclose(deviations(GROUPS), SPREADS, rtol=1e-15)
    found = advantages(GROUPS, "mean", "group")
    np.testing.assert_allclose(found[0], 0.5 / (SPREADS[0] + EPSILON) * np.array([1, -1, -1, 1]))
    assert found[1].tolist() == [0.0] * 4


def test_a_batch_is_divided_by_the_deviation_of_all_scores() -> None:
    spread = np.nanstd(GROUPS, ddof=1)
    found = advantages(GROUPS, "mean", "batch")
    np.testing.assert_allclose(found, advantages(GROUPS, "mean", "none") / (spread + EPSILON))


@pytest.mark.parametrize("kind", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_the_only_scored_answer_of_a_group_teaches_nothing(kind: str, scale: str) -> None:
    rewards = np.array([[NAN, 5.0, NAN], [NAN, NAN, NAN], [0.0, 1.0, 2.0]])
    found = advantages(rewards, kind, scale)  # type: ignore[arg-type]
    assert found[:2].tolist() == [[0.0] * 3] * 2


def test_a_missing_score_counted_as_0_would_train_towards_missing_scores() -> None:
    negative = np.array([[-1.0, -1.0, NAN]])
    assert advantages(negative, "mean", "none").tolist() == [[0.0, 0.0, 0.0]]
    assert advantages(np.nan_to_num(negative), "mean", "none")[0, 2] > 0.6


def test_several_rewards_are_normalised_each_by_itself_then_over_the_rollout() -> None:
    """GDPO: the groups [1, 0] and [10, 0], [0, 0] and [1, 3] have deviations 1/sqrt 2, 5 sqrt 2, 0
    and sqrt 2, so that every difference counts as 1 or 0 before the weights."""
    first = np.array([[1.0, 0.0], [0.0, 0.0]])
    second = np.array([[10.0, 0.0], [1.0, 3.0]])
    half = np.sqrt(0.5)  # Of a group of two that differ: (1 - 1/2) / (1 / sqrt 2).
    sums = np.array([[1.5 * half, -1.5 * half], [-0.5 * half, 0.5 * half]])
    spread = np.sqrt(2 * (1.125 + 0.125) / 3)
    found = decoupled([(1.0, first), (0.5, second)], "mean", "group")
    np.testing.assert_allclose(found, sums / spread, rtol=5e-4)  # As far as EPSILON.
    assert found.sum() == pytest.approx(0, abs=1e-12)


def test_equal_sums_of_different_rewards_have_different_advantages() -> None:
    """Which is why GDPO normalises first: their sums give GRPO one advantage."""
    rewards = [(1.0, np.array([[1.0, 0.0, 0.0, 0.0]])), (1.0, np.array([[0.0, 1.0, 1.0, 0.0]]))]
    total = rewards[0][1] + rewards[1][1]
    first, second, *_ = advantages(total, "mean", "group")[0]
    assert first == second
    first, second, *_ = decoupled(rewards, "mean", "group")[0]
    assert first > second + 0.25


def test_a_reward_that_does_not_apply_adds_what_its_mean_adds() -> None:
    first = np.array([[1.0, NAN, 3.0, NAN], [NAN, NAN, NAN, 2.0]])
    second = np.array([[0.0, 0.0, 0.0, NAN], [4.0, 6.0, NAN, NAN]])
    found = decoupled([(1.0, first), (2.0, second)], "mean", "group")
    half = np.sqrt(0.5)
    # The fourth answer and the seventh have no reward; the eighth is the only one with its reward.
    sums = np.array([[-half, 0.0, half, NAN], [-2 * half, 2 * half, NAN, 0.0]])
    spread = np.sqrt(5 / 5)
    np.testing.assert_allclose(found, np.nan_to_num(sums / spread), rtol=5e-4, atol=1e-12)
    assert [found[0, 3], found[1, 2]] == [0, 0]


def test_groups_of_equal_scores_are_told_from_others() -> None:
    rewards = np.array([[1.0, 1.0], [1.0, 1.1], [NAN, 1.0], [NAN, NAN], [0.1 + 0.2, 0.3]])
    assert alike(rewards).tolist() == [True, False, True, True, True]


def test_the_penalty_on_length_begins_at_four_fifths() -> None:
    lengths = np.array([[1, 80, 85, 90, 100]])
    np.testing.assert_allclose(overlong(lengths, 100), [[0, 0, -0.25, -0.5, -1]], atol=1e-12)
