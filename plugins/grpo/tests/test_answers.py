"""The answers of a rollout as trees: where they end, and which of them are trained on."""

import re
from typing import Any

import numpy as np
import pytest

from rlhf.trainer import Example, Sample
from rlhf_plugin_grpo.answers import blank_tree, trees
from rlhf_plugin_grpo.config import GRPOConfig
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.judges import kept_columns, texts_of
from rlhf_rollouts.rewards import Scores
from rlhf_rollouts.written import stopped


class Letters:
    """One letter per token."""

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens)


def sample(text: str, *, finished: bool = False) -> Sample:
    return Sample([*map(ord, text)], [-0.5] * len(text), finished=finished)


def made(
    rewards: list[list[float]], *, trained: bool = True, log_ratios: Any = None, **settings: Any
) -> list[Example]:
    """Two groups of three answers of 2, 4 and 3 tokens; the longest is cut."""
    config = GRPOConfig(answers=3, max_new_tokens=4, **settings)
    group = [sample("ab", finished=True), sample("abcd"), sample("abc", finished=True)]
    flat = np.array(rewards).reshape(-1)
    scores = Scores({"one": flat}, flat, {}, {})
    prompts = [Example([1, 2], [], columns={"prompt": "x"})] * 2
    judged = Judged.of([group, group], scores)
    return trees(prompts, judged, config, trained=trained, log_ratios=log_ratios)


def num_trained(example: Example) -> list[int]:
    masks = [answer.trained for answer in example.answers]
    pairs = zip(example.answers, masks, strict=True)
    return [len(answer.tokens) if mask is None else sum(mask) for answer, mask in pairs]


def test_an_answer_stops_with_the_token_that_completes_the_pattern() -> None:
    pattern = re.compile(r"(.*\n){2}")
    found = stopped(sample("one\ntwo\nthree"), pattern, Letters())
    assert (Letters().decode(found.tokens, True), found.finished) == ("one\ntwo\n", True)
    assert len(found.logprobs) == 8
    same = sample("one\ntwo")
    assert stopped(same, pattern, Letters()) is same


def test_groups_that_teach_nothing_are_not_computed_and_still_count_in_metrics() -> None:
    first, second = made([[1, 1, 1], [1, 0, 0]], preset="grpo", filter="zero_variance")
    assert (num_trained(first), len(first.prompt)) == ([0, 0, 0], 1)
    assert [len(answer.tokens) for answer in first.answers] == [1, 1, 1]
    assert first.values["length"].tolist() == [2, 4, 3]
    assert (num_trained(second), list(second.prompt)) == ([2, 4, 3], [1, 2])
    assert [first.values["kept"].sum(), second.values["kept"].sum()] == [0, 3]
    plain = made([[1, 1, 1], [1, 0, 0]], preset="grpo")[0]
    assert (num_trained(plain), plain.values["advantage"].tolist()) == ([2, 4, 3], [0, 0, 0])


def test_groups_of_equal_rewards_are_left_out_whatever_their_lengths() -> None:
    first, second = made([[1, 1, 1], [1, 0, 0]], preset="dapo")
    assert (num_trained(first), num_trained(second)) == ([0, 0, 0], [2, 4, 3])


def decoupled(first: Any, second: Any, weight: float = 1.0, **settings: Any) -> list[Example]:
    """Two groups of three answers with two rewards, the second with this weight, which are
    normalised each by itself."""
    config = GRPOConfig(answers=3, max_new_tokens=4, aggregation="normalize_then_sum", **settings)
    group = [sample("ab", finished=True), sample("abcd"), sample("abc", finished=True)]
    by_name = {"first": np.ravel(first).astype(float), "second": np.ravel(second).astype(float)}
    total = by_name["first"] + weight * by_name["second"]
    scores = Scores(by_name, total, {}, {}, {"first": 1.0, "second": weight})
    prompts = [Example([1, 2], [], columns={"prompt": "x"})] * 2
    return trees(prompts, Judged.of([group, group], scores), config)


def test_a_group_whose_rewards_differ_and_have_equal_sums_is_trained_on() -> None:
    rewards = [[2, 0, 0], [1, 1, 1]], [[0, 1, 1], [2, 2, 2]]
    settings: Any = {"preset": "dapo", "truncated": "count"}
    first, second = decoupled(*rewards, weight=2, **settings)
    assert (num_trained(first), num_trained(second)) == ([2, 4, 3], [0, 0, 0])
    assert first.values["same_reward"].tolist() == [0, 0, 0]
    assert second.values["same_reward"].tolist() == [1, 1, 1]
    # The second reward has twice the weight, whatever its size.
    z = np.array([2, -1, -1]) / np.sqrt(3)
    spread = np.sqrt((z * z).sum() / 5)
    np.testing.assert_allclose(first.values["advantage"], -z / spread, rtol=1e-3)


def test_a_reward_without_a_weight_is_only_a_metric_when_each_is_normalised() -> None:
    rewards = [[1, 1, 1], [1, 0, 0]], [[0, 1, 1], [0, 1, 0]]
    first, second = decoupled(*rewards, weight=0, preset="dapo", truncated="count")
    assert (num_trained(first), num_trained(second)) == ([0, 0, 0], [2, 4, 3])
    np.testing.assert_allclose(first.values["advantage"], 0, atol=1e-12)
    _, low, lower = second.values["advantage"]
    assert low == lower


def test_rewards_without_any_weight_teach_nothing_when_each_is_normalised() -> None:
    config = GRPOConfig(answers=3, max_new_tokens=4, aggregation="normalize_then_sum")
    scores = np.array([0.0, 1.0, 0.0])
    unscored = Scores({"one": scores}, np.full(3, np.nan), {}, {}, {"one": 0.0})
    judged = Judged.of([[sample("ab"), sample("abcd"), sample("abc")]], unscored)
    (example,) = trees([Example([1, 2], [])], judged, config, trained=False)
    assert example.values["same_reward"].tolist() == [1, 1, 1]
    assert example.values["advantage"].tolist() == [0, 0, 0]


def test_the_penalty_on_length_is_a_reward_of_its_own_when_each_is_normalised() -> None:
    rewards = [[1, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]
    first, second = decoupled(*rewards, preset="grpo", truncated="soft")
    # In the first group, the reward and the penalty say the same of the second answer.
    ratio = first.values["advantage"] / second.values["advantage"]
    np.testing.assert_allclose(ratio, 2, rtol=1e-3)


def test_cut_answers_can_be_left_out_of_loss_and_counts() -> None:
    rewards = [[1, 0, 0], [0, 3, 0]]
    first, second = made(rewards, preset="dr_grpo", truncated="mask")
    assert [num_trained(first), num_trained(second)] == [[2, 0, 3], [2, 0, 3]]
    assert second.values["kept"].tolist() == [1, 0, 1]
    # They are still in the mean of their group.
    assert second.values["advantage"].tolist() == [-1, 2, -1]


def test_long_answers_cost_reward_but_the_metric_is_the_reward() -> None:
    first, _ = made([[1, 1, 1], [1, 0, 0]], preset="dr_grpo", truncated="soft")
    penalty = np.array([0.0, -1.0, 0.0])
    np.testing.assert_allclose(first.values["advantage"], penalty - penalty.mean())
    assert first.values["reward"].tolist() == [1, 1, 1]
    assert first.values["same_reward"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("preset", ["dapo", "grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_the_advantages_of_a_group_add_up_to_0_whatever_its_penalties(preset: str) -> None:
    ratios = np.array([[0.5, -1.0, 2.0], [0.0, 3.0, 1.0]])
    rewards = [[1.0, np.nan, 0.5], [1.0, 0.0, 0.25]]
    settings: Any = {"preset": preset, "truncated": "soft"}
    for example in made(rewards, log_ratios=ratios, **settings):
        assert abs(sum(example.values["advantage"])) < 1e-12


def test_the_tokens_that_were_drawn_are_trained_on() -> None:
    # Text would be encoded in other tokens: a tokenizer does not write one letter each.
    first, _ = made([[1, 0, 0], [1, 0, 0]], preset="grpo")
    assert [[*answer.tokens] for answer in first.answers] == [[97, 98], [97, 98, 99, 100],
                                                              [97, 98, 99]]  # fmt: skip


def test_an_answer_without_a_score_is_not_trained_on() -> None:
    first, _ = made([[1, np.nan, 0], [1, 0, 0]], preset="dr_grpo")
    assert num_trained(first) == [2, 0, 3]
    assert first.values["scored"].tolist() == [1, 0, 1]
    assert first.values["reward"].tolist() == [1, 0, 0]
    assert first.values["advantage"].tolist() == [0.5, 0, -0.5]


def test_answers_to_held_out_prompts_are_not_computed() -> None:
    for example in made([[1, 0, 0], [1, 0, 0]], trained=False, preset="grpo"):
        assert num_trained(example) == [0, 0, 0]


def test_the_blank_tree_has_the_values_of_a_rollout() -> None:
    for passes in (1, 2):
        config = GRPOConfig(answers=3, max_new_tokens=50, passes=passes)
        blank = blank_tree(config, np.array([10, 5]), ["Counter"], most=40)
        assert [len(answer.tokens) for answer in blank.answers] == [35] * 3
        assert {len(row) for row in blank.values["drawn"]} == {35}
        assert ("old" in blank.values) == (passes == 2)
        assert "reward/Counter" in blank.values


def test_the_blank_tree_is_as_large_and_as_long_as_any() -> None:
    config = GRPOConfig(answers=8, max_new_tokens=512)
    # The longest prompt leaves the least room for answers.
    blank = blank_tree(config, np.array([2000, 1536, 10]), [], most=2048)
    assert (len(blank.prompt), [len(answer.tokens) for answer in blank.answers]) == (
        1536,
        [512] * 8,
    )
    short = blank_tree(config, np.array([2000, 10]), [], most=2048)
    assert len(short.prompt) == 10
    assert [len(answer.tokens) for answer in short.answers] == [2038, *[512] * 7]


def test_rewards_read_text_or_messages_as_the_prompt_is_given() -> None:
    talk = [{"role": "user", "content": "x"}]
    examples = [Example([1], [], columns={"prompt": each}) for each in ("x", talk)]
    prompts, completions = texts_of(examples, [[sample("a")], [sample("b")]], Letters())
    assert prompts == ["x", talk]
    assert completions == [["a"], [[{"role": "assistant", "content": "b"}]]]


def test_columns_that_json_does_not_have_are_left_out() -> None:
    row = {"prompt": "x", "answer": 3, "image": b"\x00", "tags": ["a"], "when": {1, 2}}
    assert kept_columns(row) == {"prompt": "x", "answer": 3, "tags": ["a"]}
