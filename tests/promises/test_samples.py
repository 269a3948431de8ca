"""Samples of evaluations: answers that the policy writes to held-out prompts, and scores of
answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import sft_runs
from rlhf.commands.main import main
from rlhf.errors import RLHFError
from rlhf.request.reader import read_config
from rlhf.train import samples
from rlhf.train.dataset import prepare_data
from rlhf.train.progress import sample_line
from rlhf.train.set_up import check_samples
from rlhf_devkit import layouts, run, short_run
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import SAMPLE_TOKENS
from rlhf_plugin_prm.scorer import Scorer as ProcessScorer
from rlhf_plugin_rm.scorer import Scorer
from sft_runs import Inputs

SAMPLES = ("--train.samples", "3", "--train.eval_every", "2", "--train.eval_at_start", "true")


def samples_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def short(words: list[str], cache: str) -> None:
    """`sft_runs.run` with samples of few tokens."""
    with patch.object(samples, "MAX_NEW_TOKENS", SAMPLE_TOKENS):
        sft_runs.run(words, cache)


def taken(
    trainer: str, format: str, ranks: Ranks, folder: Path, *more: str
) -> list[dict[str, Any]]:
    """The samples of a run of four steps."""
    words = [*short_run(folder, format), "--output", str(folder / "run"), *SAMPLES, *more]
    ranks.run(run, trainer, words, str(folder / "cache"))
    return samples_of(folder / "run")


def held_out(folder: Path) -> list[dict[str, Any]]:
    """The rows that samples are of."""
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()][:3]


def most_likely(model: Path, prompts: list[Any]) -> list[str]:
    """The most likely answers of an exported model, by transformers."""
    written: Any = LlamaForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = ids["input_ids"].shape[1]
        room = written.config.max_position_embeddings - length
        with torch.no_grad():
            out = written.generate(**ids, max_new_tokens=min(SAMPLE_TOKENS, room), do_sample=False)
        answers.append(tokenizer.decode(out[0, length:], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize(
    "layout",
    [
        layouts()["stage 3"],
        *(
            pytest.param((f"--deepspeed.{axis}_parallel", "2"), marks=pytest.mark.matrix)
            for axis in ("sequence", "tensor")
        ),
    ],
    ids=["stage 3", "sequence axis", "tensor axis"],
)
def test_samples_are_the_most_likely_answers_on_any_number_of_ranks(
    layout: tuple[str, ...], two: Ranks, one: Ranks, tmp_path: Path
) -> None:
    more = ("--model", "demo:base", "--train.eval_at_start", "false")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    found = taken("sft", "demonstration", two, tmp_path / "two", *layout, *more)
    for sample in taken("sft", "demonstration", one, tmp_path / "one", *more):
        sample["row"] = sample["row"].replace("/one/", "/two/")
        assert sample in found
    assert len({sample["answers"][0] for sample in found}) > 3
    assert [sample["step"] for sample in found] == [2] * 3 + [4] * 3
    rows = held_out(tmp_path / "two")
    for sample, row in zip(found[-3:], rows, strict=True):
        assert row["messages"][0]["content"] in sample["prompt"]
    prompts = [row["messages"][:1] for row in rows]
    answers = most_likely(tmp_path / "two" / "run" / "model", prompts)
    assert [sample["answers"] for sample in found[-3:]] == [[answer] for answer in answers]


@pytest.mark.parametrize(
    ("trainer", "format", "more"),
    [
        ("dpo", "preference", ()),
        pytest.param("kto", "unpaired", (), marks=pytest.mark.matrix),
        pytest.param(
            "kd",
            "demonstration",
            ("--kd.teacher", "demo:base", "--kd.on_policy", "0.5", "--kd.max_new_tokens", "8"),
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_preference_trainer_and_a_student_write_the_most_likely_answers(
    trainer: str, format: str, more: tuple[str, ...], two: Ranks, tmp_path: Path
) -> None:
    rate = ("--optim.lr", "1e-4")  # So that answers end, and none is nearly as likely as another.
    found = taken(trainer, format, two, tmp_path, "--model", "demo:base", *rate, *more)
    assert len(found) == 9
    rows = held_out(tmp_path)
    prompts = [row["prompt"] if "prompt" in row else row["messages"][:1] for row in rows]
    answers = most_likely(tmp_path / "run" / "model", prompts)
    assert [sample["answers"] for sample in found[-3:]] == [[answer] for answer in answers]
    assert not any("scores" in sample for sample in found)


def test_a_reward_model_shows_the_rewards_of_held_out_answers(two: Ranks, tmp_path: Path) -> None:
    # Three rows on two ranks, in two micro-batches.
    found = taken("rm", "preference", two, tmp_path, "--batch.tokens", "256", *layouts()["stage 3"])
    scorer = Scorer(tmp_path / "run" / "model")
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    for sample, row in zip(found[-3:], rows[:3], strict=True):
        rewards = scorer.rewards(row["prompt"], [row["chosen"], row["rejected"]])
        assert sample["scores"] == pytest.approx(rewards, abs=1e-5)
        assert row["chosen"][0]["content"] in sample["answers"][0]


def test_a_process_reward_model_shows_the_probability_of_each_step(
    two: Ranks, tmp_path: Path
) -> None:
    found = taken("prm", "stepwise", two, tmp_path)
    scorer = ProcessScorer(tmp_path / "run" / "model")
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    for sample, row in zip(found[-3:], rows[:3], strict=True):
        expected = scorer.probabilities(row["prompt"], row["completions"])
        assert sample["scores"] == [pytest.approx(expected, abs=1e-5)]


def test_a_run_prints_its_samples_after_the_evaluation(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.samples", "2", "--train.steps", "1")
    assert main(["run", "sft", *words, "--nproc", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [sample_line(sample) for sample in samples_of(tmp_path / "run")]
    place = lines.index(expected[0])
    assert lines[place : place + 2] == expected
    assert lines[place - 1].startswith("evaluation at step 1: ")


def test_a_resumed_run_writes_each_sample_once(inputs: Inputs, one: Ranks, tmp_path: Path) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "4", *SAMPLES)
    one.run(short, [*words, "--train.stop_at", "3"], str(inputs.cache))
    one.run(short, [*words, "--resume"], str(inputs.cache))
    steps = [sample["step"] for sample in samples_of(tmp_path / "run")]
    assert steps == [0] * 3 + [2] * 3 + [3] * 3 + [4] * 3


def test_samples_need_held_out_rows_with_a_prompt(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    words = sft_runs.words(inputs, tmp_path / "run", "--train.samples", "2")
    with pytest.raises(RLHFError, match=r"train\.samples needs data\.eval"):
        read_config("sft", overrides=[*words, "--data.eval", "[]"])
    request = read_config("sft", overrides=[*words, "--sft.train_on", "everything"])
    with pytest.raises(RLHFError) as error:
        prepare_data(request)
    assert str(error.value) == (
        "train.samples 2 needs prompts to answer, but no row of data.eval has one; remove "
        "train.samples"
    )


def test_a_policy_without_text_and_scores_has_no_samples(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    words = sft_runs.words(inputs, tmp_path / "run", "--train.samples", "2")
    request = read_config("sft", overrides=words)
    trainer = prepare_data(request).trainer
    policy: Any = SimpleNamespace(spec=SimpleNamespace(task="classifier"))
    with pytest.raises(RLHFError) as error:
        check_samples("silent", trainer, request.config, policy)
    assert str(error.value) == (
        "train.samples: the policy of trainer 'silent' writes no text and its answers have no "
        "scores; remove train.samples, or define score() in the trainer"
    )
    policy.spec.task = "causal"
    check_samples("silent", trainer, request.config, policy)


def test_a_sample_is_shown_in_one_line() -> None:
    prompt = "You are a calculator that answers briefly.\nHow much is 3 + 4?"
    written = {"prompt": prompt, "answers": ["3 + 4 = 7\nThe answer is 7."]}
    assert sample_line(written) == (
        "sample     ...briefly. How much is 3 + 4? -> 3 + 4 = 7 The answer is 7."
    )
    rewarded = {"prompt": "3 + 4?", "answers": ["7", "8"], "scores": [1.25, -0.5]}
    pictured = {**written, "prompt": "image 1 (a.png): 8 x 8 pixels\nWhat is it?", "images": ["x"]}
    assert sample_line(pictured) == "sample     What is it? -> 3 + 4 = 7 The answer is 7."
    assert sample_line(rewarded) == "sample     3 + 4? -> 1.25: 7 | -0.5: 8"
    stepwise = {"prompt": "3 + 4?", "answers": ["a", "b"], "scores": [[0.9, 0.125], []]}
    assert sample_line(stepwise) == "sample     3 + 4? -> 0.125: a | -: b"
