"""GRPO on real engines against what every trainer has to prove, and what ends a run."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import frozen
from transformers import LlamaForSequenceClassification

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf_devkit import Other, TrainerConformance, tiny
from rlhf_devkit.curves import same_curve
from rlhf_devkit.ranks import shared
from rlhf_plugin_grpo import trainer
from rlhf_plugin_grpo.trainer import LEAST_GROUPS, PATIENCE

REWARDS = Path(__file__).with_name("grpo_rewards.py")
KL = {"beta": 0.1}


class TestGRPO(TrainerConformance):
    """Every answer counts, so that each setting shows in the loss."""

    trainer = "grpo"
    words = (
        "--grpo.preset", "grpo", "--grpo.rewards", f"{REWARDS}:few_letters",
        "--grpo.answers", "3", "--grpo.max_new_tokens", "6", "--data.max_tokens", "64",
    )  # fmt: skip
    others: ClassVar[dict[str, Any]] = {
        "rewards": [{"function": f"{REWARDS}:short"}],
        "preset": "gspo",
        "answers": 2,
        "max_new_tokens": 4,
        "temperature": 0.7,
        "stop": "[aeiou]",
        "advantage": Other(value="none", under={"scale": "none"}),
        "scale": "batch",
        "aggregation": "normalize_then_sum",
        "ratio": Other(value="sequence", under={"passes": 2}),
        "clip": Other(value={"low": 0.01, "high": 0.01}, under={"passes": 2}),
        "per": "constant",
        "correction": {"high": 1.0000001},
        "kl": {"beta": 0.5, "estimator": "k2"},
        "truncated": "soft",
        "filter": Other(value="zero_variance", under={"max_new_tokens": 1}),
        "batches": 2,
        "passes": 2,
        "loss": "grpo_rewards:squared",
        "entropy": 0.5,
    }
    without_effect: ClassVar[dict[str, str]] = {
        "eval": "it is about held-out prompts",
        "agreement": "it is a bound that ends a run",
        "deadline": "it only ends what hangs",
        "workers": "scores do not depend on who computes them",
        "tools": "a model with random weights calls none; test_tool_calls.py has one that does",
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


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("grpo")
    train = rlhf_demo.rows("arithmetic", "train", "prompt")
    words = [
        "--model", str(tiny.make_model(folder / "model")), "--model.dtype", "fp32",
        "--data.train", str(tiny.write_rows(folder / "train.jsonl", train[:8])),
        "--data.eval", str(tiny.write_rows(folder / "eval.jsonl", train[8:12])),
        "--data.workers", "0", "--batch.size", "4", "--data.max_tokens", "64",
        "--grpo.max_new_tokens", "6", "--grpo.answers", "4", "--checkpoint.every", "null",
    ]  # fmt: skip
    return Inputs(words, str(folder / "cache"))


def plain(inputs: Inputs, output: Path, reward: str, *more: str) -> tiny.Metrics:
    words = [*inputs.words, "--output", str(output), "--grpo.rewards", f"{REWARDS}:{reward}"]
    return tiny.run("grpo", [*words, *more], inputs.cache, True)


@pytest.mark.parametrize("reward", ["raises", "too_few", "text"])
def test_a_reward_that_fails_ends_the_run_before_anything_is_trained_on(
    reward: str, inputs: Inputs, tmp_path: Path
) -> None:
    with pytest.raises(RLHFError) as caught:
        plain(inputs, tmp_path / "run", reward, "--train.steps", "2")
    assert str(caught.value).startswith(f"reward {reward!r}: ")
    assert "\n" not in str(caught.value)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()


def test_a_reward_that_scores_nothing_ends_the_run(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        plain(inputs, tmp_path / "run", "nothing", "--train.steps", "2")
    assert str(caught.value) == (
        "step 1: no reward has scored any of the 16 answers; check grpo.rewards"
    )


def test_a_rollout_of_cut_answers_ends_a_run_that_leaves_them_out(
    inputs: Inputs, tmp_path: Path
) -> None:
    more = ("--train.steps", "2", "--grpo.truncated", "mask", "--grpo.max_new_tokens", "1")
    with pytest.raises(RLHFError) as caught:
        plain(inputs, tmp_path / "run", "few_letters", *more)
    assert str(caught.value) == (
        "step 1: all 16 answers were cut at grpo.max_new_tokens 1, and none is trained on; raise it"
    )


def test_a_collapsed_policy_ends_the_run(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "LEAST_GROUPS", 4)
    more = ("--train.steps", "20", "--grpo.truncated", "count")
    with pytest.raises(RLHFError) as caught:
        plain(inputs, tmp_path / "run", "until_step_2", *more)
    assert str(caught.value) == (
        f"step {PATIENCE + 2}: the answers to each of the last {4 * PATIENCE} prompts had the same "
        "reward, now 0 on average and 1 at the start: the policy has collapsed; lower optim.lr, or "
        "set grpo.kl.beta"
    )


def test_a_few_groups_that_are_alike_are_no_collapse(inputs: Inputs, tmp_path: Path) -> None:
    assert LEAST_GROUPS > 4
    more = ("--train.steps", "13", "--grpo.truncated", "count")
    plain(inputs, tmp_path / "run", "until_step_2", *more)


def test_the_first_rollout_says_if_most_groups_teach_nothing(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain(inputs, tmp_path / "run", "until_step_2", "--train.steps", "1")
    printed = capsys.readouterr().out
    assert (
        "\ngroups     reward 1; 0 of 4 groups differ in their rewards, the others teach nothing: "
        "raise grpo.answers, or choose other prompts\n"
    ) in printed
    assert "\nmethod     dapo\n" in printed
    assert "\nrewards    until_step_2 x 1\n" in printed


def test_answers_that_may_be_larger_than_the_budget_are_refused(
    inputs: Inputs, tmp_path: Path
) -> None:
    with pytest.raises(RLHFError) as caught:
        plain(inputs, tmp_path / "run", "short", "--batch.tokens", "25")
    text = str(caught.value)
    assert ": with a new answer the example may have " in text
    assert " tokens but batch.tokens is 25: set batch.tokens to at least " in text
    assert text.endswith(", or lower grpo.max_new_tokens")


def test_a_group_that_is_larger_than_the_budget_gives_the_same_curve(
    inputs: Inputs, tmp_path: Path
) -> None:
    more = ("--train.steps", "3", "--grpo.preset", "gspo", "--optim.lr", "1e-2")
    curves = [
        plain(inputs, tmp_path / tokens, "few_letters", *more, "--batch.tokens", tokens)
        for tokens in ("1000", "32")
    ]
    same_curve(*curves)


def test_rewards_that_are_normalised_by_themselves_give_one_curve_on_any_layout(
    inputs: Inputs, tmp_path: Path
) -> None:
    """The last normalisation is over the whole rollout, not over a rank or a micro-batch."""
    rewards = f"[{{function: '{REWARDS}:few_letters'}}, {{function: '{REWARDS}:short', weight: 2}}]"
    own = ("--train.steps", "3", "--grpo.aggregation", "normalize_then_sum", "--optim.lr", "1e-2")
    words = [*inputs.words, *own, "--grpo.rewards", rewards, "--grpo.batches", "2"]
    one = tiny.run("grpo", [*words, "--output", str(tmp_path / "one")], inputs.cache, True)
    more = ("--batch.tokens", "32", "--output", str(tmp_path / "two"))
    two, _ = shared(2).run(tiny.run, "grpo", [*words, *more], inputs.cache)
    same_curve(two, one)
    assert one[0]["reward_std"] > 0


def test_the_best_checkpoint_is_that_of_the_highest_reward_on_held_out_prompts(
    inputs: Inputs, tmp_path: Path
) -> None:
    more = ("--train.steps", "4", "--train.eval_every", "1", "--checkpoint.best", "+eval/reward")
    answers = ("--grpo.eval.answers", "3", "--grpo.eval.temperature", "1", "--optim.lr", "1e-2")
    metrics = plain(inputs, tmp_path / "run", "few_letters", *more, *answers)
    rewards = [line["eval/reward"] for line in metrics if "eval/reward" in line]
    assert len(set(rewards)) > 1
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert (tmp_path / "run" / "checkpoints" / f"step-{best + 1:06}").is_dir()


def test_a_reward_model_scores_the_answers(inputs: Inputs, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "judge", seed=3)
    LlamaForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(model)
    words = [*inputs.words, "--output", str(tmp_path / "run"), "--train.steps", "1"]
    rewards = f"[{{model: {model}, name: judge}}, {{function: '{REWARDS}:short', weight: 0}}]"
    words += ["--grpo.rewards", rewards, "--grpo.truncated", "count"]
    first = tiny.run("grpo", words, inputs.cache, True)[0]
    assert first["reward"] == pytest.approx(first["rewards/judge/mean"], rel=1e-6)
    assert first["rewards/judge/std"] > 0
    assert -6 <= first["rewards/short/mean"] <= -1


def test_a_language_model_is_no_reward_model(inputs: Inputs, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "judge")
    words = [*inputs.words, "--output", str(tmp_path / "run"), "--train.steps", "1"]
    words += ["--grpo.rewards", f"[{{model: {model}, name: judge}}]"]
    with pytest.raises(RLHFError) as error:
        tiny.run("grpo", words, inputs.cache, True)
    assert str(error.value) == (
        f"reward 'judge': {model} is LlamaForCausalLM and no reward model "
        "(...ForSequenceClassification); train one from it with rlhf run rm"
    )


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_distance_from_the_reference_changes_the_second_step(
    place: str, inputs: Inputs, tmp_path: Path
) -> None:
    more = ("--train.steps", "2", "--grpo.preset", "dr_grpo", "--optim.lr", "1e-2")
    free = plain(inputs, tmp_path / "free", "few_letters", *more)
    kl = ("--grpo.kl.beta", "10", "--grpo.kl.in", place)
    bound = plain(inputs, tmp_path / "bound", "few_letters", *more, *kl)
    norms = [[line["grad_norm"] for line in each if "grad_norm" in line] for each in (free, bound)]
    # The policy is the reference before the first step.
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-4)
    assert norms[0][1] != pytest.approx(norms[1][1], rel=1e-2)


def test_what_a_reward_logs_belongs_to_its_steps_and_held_out_answers_are_counted(
    inputs: Inputs, tmp_path: Path
) -> None:
    more = ("--train.steps", "3", "--train.eval_every", "2", "--grpo.passes", "2")
    answers = ("--grpo.eval.answers", "3", "--grpo.eval.temperature", "1")
    lines = plain(inputs, tmp_path / "run", "logging", *more, *answers)
    assert [line["steps_before"] for line in lines if "loss" in line] == [0, 0, 2]
    (held_out,) = (line for line in lines if "eval/loss" in line and line["step"] == 2)
    assert held_out["eval/steps_before"] == 2
    # Of the 12 answers every second has the reward 1.
    assert held_out["eval/avg@3"] == pytest.approx(0.5)
    assert held_out["eval/pass@2"] == pytest.approx(5 / 6)
    assert held_out["eval/pass@3"] == 1
    assert "pass@3" not in lines[0]


def test_other_probabilities_in_sampling_than_in_training_end_the_run(
    inputs: Inputs, tmp_path: Path
) -> None:
    with pytest.raises(RLHFError) as caught:
        plain(inputs, tmp_path / "run", "few_letters", "--grpo.agreement", "1e-30")
    text = str(caught.value)
    assert text.startswith("the log-probabilities of the ")
    assert " but grpo.agreement is 1e-30: " in text


def test_metrics_have_the_names_of_trl(inputs: Inputs, tmp_path: Path) -> None:
    more = ("--train.steps", "1", "--grpo.preset", "grpo")
    first = plain(inputs, tmp_path / "run", "few_letters", *more)[0]
    names = (
        "reward", "reward_std", "frac_reward_zero_std", "rewards/few_letters/mean",
        "rewards/few_letters/std", "completions/mean_length", "completions/min_length",
        "completions/max_length", "completions/clipped_ratio",
        "completions/mean_terminated_length", "entropy", "kl", "clip_ratio/low_mean",
        "clip_ratio/high_mean", "clip_ratio/region_mean",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/max",
    )  # fmt: skip
    assert not {*names} - first.keys()
    assert first["reward"] == first["rewards/few_letters/mean"]
    assert first["completions/max_length"] == 6
    assert abs(first["kl"]) < 1e-6
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
