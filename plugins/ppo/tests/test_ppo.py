"""PPO on real engines against what every trainer has to prove, and its critic."""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import frozen
from transformers import AutoTokenizer, LlamaForSequenceClassification

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf.trainer import Example, Sample
from rlhf_devkit import Other, TrainerConformance, tiny
from rlhf_plugin_ppo.answers import blank_tree, estimates, trees
from rlhf_plugin_ppo.config import PPOConfig
from rlhf_rollouts.judged import Judged

REWARDS = Path(__file__).with_name("ppo_rewards.py")


class TestPPO(TrainerConformance):
    """Three batches are a rollout, so that the runs stop and are resumed inside of one."""

    trainer = "ppo"
    words = (
        "--ppo.rewards", f"{REWARDS}:few_letters", "--ppo.answers", "2", "--ppo.batches", "3",
        "--ppo.max_new_tokens", "6", "--data.max_tokens", "64", "--ppo.critic.optim.lr", "1e-2",
        "--ppo.kl.beta", "0.1", "--ppo.kl.target", "0.1", "--ppo.kl.horizon", "100",
    )  # fmt: skip
    others: ClassVar[dict[str, Any]] = {
        "rewards": [{"function": f"{REWARDS}:short"}],
        "answers": 1,
        "max_new_tokens": 4,
        "temperature": 0.7,
        "stop": "[aeiou]",
        "gamma": 0.9,
        "lambda": 0.5,
        "reward_clip": 0.5,
        "missing_eos_penalty": 1.0,
        "whiten_rewards": True,
        "whiten_advantages": False,
        "clip": {"low": 0.01, "high": 0.01, "value": 0.01},
        "kl": {"beta": 0.5, "target": 0.2, "horizon": 100},
        "critic": {"warmup": 3},
        "correction": {"high": 1.0000001},
        "batches": 2,
        "passes": Other(value=2, under={"batches": 1}),
    }
    without_effect: ClassVar[dict[str, str]] = {
        "eval": "it is about held-out prompts",
        "agreement": "it is a bound that ends a run",
        "deadline": "it only ends what hangs",
        "workers": "scores do not depend on who computes them",
        "tools": "a model with random weights calls none; those of GRPO are the same code",
    }

    marks_of_other_layouts = (pytest.mark.matrix,)

    @pytest.mark.matrix
    def test_a_run_with_another_setting_resumes_to_the_last_bit(self, bench: Any) -> None:
        super().test_a_run_with_another_setting_resumes_to_the_last_bit(bench)


@frozen
class Inputs:
    """Words of a run of the tiny model in fp32, without rewards."""

    words: list[str]
    cache: str
    model: Path

    def run(self, output: Path, reward: str, *more: str) -> tiny.Metrics:
        words = [*self.words, "--output", str(output), "--ppo.rewards", f"{REWARDS}:{reward}"]
        return tiny.run("ppo", [*words, *more], self.cache, True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("ppo")
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")
    model = tiny.make_model(folder / "model")
    words = [
        "--model", str(model), "--model.dtype", "fp32",
        "--data.train", str(tiny.write_rows(folder / "train.jsonl", rows[:8])),
        "--data.eval", str(tiny.write_rows(folder / "eval.jsonl", rows[8:12])),
        "--data.workers", "0", "--batch.size", "4", "--data.max_tokens", "64",
        "--ppo.max_new_tokens", "6", "--ppo.answers", "2", "--checkpoint.every", "null",
        "--train.steps", "2",
    ]  # fmt: skip
    return Inputs(words, str(folder / "cache"), model)


def test_a_reward_that_scores_nothing_ends_the_run(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        inputs.run(tmp_path / "run", "nothing")
    assert str(caught.value) == (
        "step 1: no reward has scored any of the 16 answers; check ppo.rewards"
    )


def test_metrics_have_the_names_of_trl_and_openrlhf(inputs: Inputs, tmp_path: Path) -> None:
    bounds = ("--ppo.clip.low", "1e-3", "--ppo.clip.high", "1e-3")
    first, second, *_ = inputs.run(tmp_path / "run", "few_letters", *bounds, "--optim.lr", "1e-2")
    names = (
        "reward", "rewards/few_letters/mean", "rewards/few_letters/std", "entropy", "kl",
        "objective/kl", "kl_coef", "completions/mean_length", "completions/min_length",
        "completions/max_length", "completions/clipped_ratio", "clip_ratio/low_mean",
        "clip_ratio/high_mean", "clip_ratio/region_mean", "clip_ratio/value", "policy_loss",
        "value_loss", "values/mean", "returns/mean", "explained_variance",
        "sampling/importance_sampling_ratio/mean", "critic/grad_norm", "critic/learning_rate",
    )  # fmt: skip
    assert not {*names} - first.keys()
    # The policy is the reference when the answers are written.
    assert abs(first["objective/kl"]) < 1e-5
    assert first["loss"] == pytest.approx(first["policy_loss"] + first["value_loss"], rel=1e-5)
    # The second step trains on answers of the same rollout with a policy that has moved.
    assert second["clip_ratio/region_mean"] > 0 == first["clip_ratio/region_mean"]


def test_only_the_critic_is_trained_during_its_warm_up(inputs: Inputs, tmp_path: Path) -> None:
    more = ("--ppo.critic.warmup", "2", "--ppo.batches", "2", "--train.steps", "3")
    metrics = inputs.run(tmp_path / "run", "few_letters", *more)
    norms = [line["grad_norm"] for line in metrics if "grad_norm" in line]
    assert [norm > 0 for norm in norms] == [False, False, True]
    assert all(line["critic/grad_norm"] > 0 for line in metrics if "grad_norm" in line)


def test_the_critic_starts_from_the_policy_with_a_new_head(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs.run(tmp_path / "run", "few_letters")
    assert capsys.readouterr().out.endswith(
        f"\ncritic     {tmp_path}/run/model-critic\nmodel      {tmp_path}/run/model\n"
    )
    written = json.loads((tmp_path / "run" / "model-critic" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForTokenClassification"]
    assert len(written["id2label"]) == 1


def test_the_critic_of_a_run_is_one_of_the_next(inputs: Inputs, tmp_path: Path) -> None:
    inputs.run(tmp_path / "first", "few_letters")
    critic = tmp_path / "first" / "model-critic"
    metrics = inputs.run(tmp_path / "next", "few_letters", "--ppo.critic.model", str(critic))
    first = inputs.run(tmp_path / "again", "few_letters")[0]
    assert metrics[0]["values/mean"] != first["values/mean"]


@pytest.fixture(scope="module")
def reward_model(inputs: Inputs) -> Path:
    """A reward model whose scores are larger than those of a new head."""
    folder = tiny.make_model(inputs.model.parent / "reward", seed=3)
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


def test_the_critic_keeps_the_head_of_a_reward_model(
    inputs: Inputs, reward_model: Path, tmp_path: Path
) -> None:
    more = ("--ppo.critic.model", str(reward_model), "--ppo.answers", "1")
    metrics = inputs.run(tmp_path / "run", "few_letters", *more)
    written = json.loads((tmp_path / "run" / "model-critic" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    new_head = inputs.run(tmp_path / "new", "few_letters", "--ppo.answers", "1")
    values = [abs(each[0]["values/mean"]) for each in (metrics, new_head)]
    assert values[0] != pytest.approx(values[1], rel=0.1)


def test_a_critic_with_another_tokenizer_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["a new token"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(RLHFError) as caught:
        inputs.run(tmp_path / "run", "few_letters", "--ppo.critic.model", str(folder))
    assert str(caught.value) == (
        f"ppo.critic.model {folder} has another tokenizer than the policy; choose a model with the "
        "same one"
    )


@pytest.mark.parametrize(
    ("lora", "source"),
    [
        ("true", "policy"),
        ("false", "reward model"),
        pytest.param("true", "reward model", marks=pytest.mark.matrix),
        pytest.param("false", "policy", marks=pytest.mark.matrix),
    ],
)
def test_a_critic_has_an_adapter_or_all_of_its_weights_beside_an_adapter_of_the_policy(
    lora: str, source: str, inputs: Inputs, reward_model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    more = ["--lora", "2", "--ppo.critic.lora", lora, "--train.steps", "1"]
    more += ["--ppo.critic.model", str(reward_model)] * (source == "reward model")
    inputs.run(tmp_path / "run", "few_letters", *more)
    printed = capsys.readouterr().out
    line, last = [each for each in printed.splitlines() if each.startswith("critic     ")]
    folder = tmp_path / "run" / "model-critic"
    assert line.endswith(" trained")
    assert ("parameters, trained" in line) == (lora == "false")
    assert last == f"critic     {folder}"
    assert "\nreference  adapter: " in printed
    assert (folder / "adapter_config.json").exists() == (lora == "true")


def judged(scores: list[list[float]]) -> Judged:
    """Answers of 2 and 3 tokens to each prompt; the longer one is cut."""
    group = [
        Sample([1, 2], [-0.5] * 2, finished=True),
        Sample([3, 4, 5], [-0.5] * 3, finished=False),
    ]
    total = np.array(scores)
    return Judged(groups=[group] * len(scores), by_name={"one": total}, total=total)


def test_an_answer_without_a_score_counts_nowhere() -> None:
    values = np.array([[1.0, 2.0, np.nan], [100.0, 200.0, 300.0]] * 2)
    zeros, config = 0 * values, PPOConfig()
    found = estimates(judged([[3.0, np.nan], [3.0, np.nan]]), values, zeros, config, 0.0)
    alone = estimates(
        Judged(groups=[[Sample([1, 2], [0.0, 0.0])]] * 2, by_name={}, total=np.full((2, 1), 3.0)),
        values[::2, :2], zeros[::2, :2], config, 0.0,
    )  # fmt: skip
    for name in ("advantages", "returns"):
        assert found[name][::2, :2].tolist() == alone[name].tolist()
        assert np.isnan(found[name][1::2]).all()
    examples = [Example([7], [])] * 2
    known = {"old": values, "values": values, **found}
    made = trees(examples, judged([[3.0, np.nan]] * 2), known, np.ones(4))
    assert [answer.trained for answer in made[0].answers] == [None, [False] * 3]
    assert made[0].values["kl"].tolist() == [1, 0]


def test_what_a_tool_returned_is_not_trained_on() -> None:
    nan = np.nan
    values = np.array([[1.0, nan, 2.0]])
    group = [Sample([1, 2, 3], [-1.0, nan, -2.0])]
    found = estimates(
        Judged(groups=[group], by_name={}, total=np.array([[3.0]])), values, 0 * values,
        PPOConfig(whiten_advantages=False), 0.0,
    )  # fmt: skip
    # A_2 = 3 - 2, and A_0 = 2 - 1 + 0.95 A_2: the critic's next value is that of token 2.
    assert found["advantages"][0, [0, 2]].tolist() == pytest.approx([1.95, 1.0])
    score = Judged(groups=[group], by_name={}, total=np.array([[3.0]]))
    known = {"old": values, "values": values, **found}
    (made,) = trees([Example([7], [])], score, known, np.ones(1))
    assert made.answers[0].trained == [True, False, True]
    assert made.values["length"].tolist() == [2]


def test_rewards_are_clipped_before_the_penalty_of_a_cut_answer() -> None:
    values = np.array([[0.0, 0.0, np.nan], [0.0, 0.0, 0.0]])
    config = PPOConfig(
        reward_clip=2.0, missing_eos_penalty=1.0, lambda_=1.0, whiten_advantages=False
    )
    found = estimates(judged([[5.0, 5.0]]), values, 0 * values, config, 0.0)
    assert found["returns"][:, 0].tolist() == [2.0, 1.0]


def test_the_blank_tree_has_the_values_of_a_rollout() -> None:
    config = PPOConfig(answers=3, max_new_tokens=50)
    blank = blank_tree(config, np.array([10, 5]), ["Counter"], most=40)
    assert "reward/Counter" in blank.values
    assert [len(answer.tokens) for answer in blank.answers] == [35] * 3
    assert len(blank.prompt) == 5
    for name in ("drawn", "old", "values", "advantages", "returns"):
        assert {len(row) for row in blank.values[name]} == {35}
