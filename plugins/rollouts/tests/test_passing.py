"""avg@k and pass@k by counting all subsets, and metrics that the host knows."""

from itertools import combinations

import numpy as np
import pytest
import torch

from rlhf.errors import RLHFError
from rlhf.trainer import Answer, Example, Sample
from rlhf_devkit import pack
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.passing import pass_at, passing, rollout_sums
from rlhf_rollouts.reported import Reported
from rlhf_rollouts.rewards import Scores

NAN = np.nan


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("c", [0, 1, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_an_answer_that_passes(k: int, c: int) -> None:
    subsets = [*combinations([1] * c + [0] * (5 - c), k)]
    assert pass_at(5, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_answers_pass_by_their_reward_and_those_without_one_do_not_exist() -> None:
    rewards = np.array([[1.0, 0.5, 1.5, 0.0], [0.0, NAN, NAN, 1.0], [NAN] * 4])
    found = passing(rewards, 1.0)
    assert found == {
        "avg@4": (0.5 + 0.5, 2.0),
        "pass@2": (pytest.approx(1 - 1 / 6 + 1), 2.0),
        "pass@4": (1.0, 1.0),
    }
    assert passing(rewards[:, :1], 0.5) == {"avg@1": (1.0, 2.0)}
    assert [*passing(np.zeros((1, 6)), 1.0)] == ["avg@6", "pass@2", "pass@4", "pass@6"]


def test_a_weighted_sum_that_is_rounded_below_the_threshold_passes() -> None:
    total = sum(weight * np.ones((1, 1)) for weight in (0.6, 0.3, 0.1))
    assert total[0, 0] < 1
    assert passing(total, 1.0) == {"avg@1": (1.0, 1.0)}


def test_a_step_reports_the_numbers_of_its_own_rollout() -> None:
    reported, plain = Reported(), [Example([1], [Answer([2])])] * 2
    first = reported.add(plain, {"size": (6.0, 2.0)}, step=0, training=True)
    second = reported.add(plain, {"size": (10.0, 2.0)}, step=1, training=True)
    parts = [reported.add(plain, {"size": (total, 2.0)}, step=1, training=False)
             for total in (2.0, 4.0)]  # fmt: skip
    restored = Reported()
    restored.load_state(reported.state())

    def of(examples: list[Example]) -> dict[str, float]:
        batches = [pack(examples, [0]), pack(examples, [1]), pack(examples, [])]
        sums = torch.stack([reported.metrics(batch)["rollout"][0] for batch in batches]).sum(0)
        return restored.derived({"rollout": sums.tolist()})

    assert [of(first), of(second), of(parts[0] + parts[1])] == [
        {"size": 3},
        {"size": 5},
        {"size": 1.5},
    ]
    assert of(reported.marked(plain)) == {}
    with pytest.raises(RLHFError) as caught:
        restored.derived({"rollout": [1.0, 1.0], "size": 3.0})
    assert str(caught.value) == (
        "log_metric('size'): the trainer has a metric of this name; use another one"
    )
    with pytest.raises(RLHFError) as caught:
        reported.add(plain, {"loss": (1.0, 1.0)}, step=2, training=True)
    assert str(caught.value) == (
        "log_metric('loss'): the run has a metric of this name; use another one"
    )


def test_evaluations_do_not_push_out_the_rollout_of_the_steps_between_them() -> None:
    reported, plain = Reported(), [Example([1], [Answer([2])])]
    made = reported.add(plain, {"size": (6.0, 2.0)}, step=0, training=True)
    for step in range(1, 9):
        reported.add(plain, {"size": (1.0, 1.0)}, step=step, training=False)
    sums = {"rollout": reported.metrics(pack(made, [0]))["rollout"][0].tolist()}
    assert reported.derived(sums) == {"size": 3.0}


def test_what_rewards_log_is_a_mean_over_the_answers_of_their_calls() -> None:
    scores = {"one": np.zeros(8)}, np.zeros(8), {}
    groups = [[Sample([1], [0.0])] * 8]
    asked = [Scores(*scores, {"size": given}) for given in ((1.0, 1.0), (0.0, 8.0))]
    sums = [rollout_sums(each, Judged.of(groups, each), threshold=None) for each in asked]
    reported, plain = Reported(), [Example([1], [Answer([2])])]
    for each in sums:
        made = reported.add(plain, each, step=1, training=False)
    total = {"rollout": reported.metrics(pack(made, [0]))["rollout"][0].tolist()}
    assert reported.derived(total) == {"size": pytest.approx(1 / 9)}
