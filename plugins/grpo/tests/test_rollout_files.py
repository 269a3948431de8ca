"""Rollouts as files of the run: what they hold, how many are kept, and runs that replay them."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from grpo_recordings import Recording, table

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf_devkit import tiny
from rlhf_devkit.curves import Metrics, training, weights, without_timings

REWARDS = Path(__file__).with_name("grpo_rewards.py")
STEPS = ("--train.steps", "6", "--grpo.batches", "2", "--grpo.passes", "2")
"""Of an epoch of 2 batches with 2 passes: a rollout serves 4 steps, in the second epoch 2."""


@frozen
class Inputs:
    folder: Path

    def words(self, output: Path, *more: str) -> list[str]:
        return [
            "--model", str(self.folder / "model"), "--model.dtype", "fp32",
            "--data.train", str(self.folder / "train.jsonl"),
            "--data.eval", str(self.folder / "eval.jsonl"), "--data.workers", "0",
            "--batch.size", "4", "--data.max_tokens", "64", "--optim.lr", "3e-3",
            "--grpo.max_new_tokens", "6", "--grpo.answers", "4", "--grpo.truncated", "count",
            "--grpo.rewards", f"{REWARDS}:short", "--output", str(output), *more,
        ]  # fmt: skip

    def run(self, output: Path, *more: str) -> Metrics:
        words = self.words(output, *more)
        return without_timings(tiny.run("grpo", words, str(self.folder / "cache"), True))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("rollouts")
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")
    tiny.make_model(folder / "model", ends_answers=True)
    tiny.write_rows(folder / "train.jsonl", rows[:8])
    tiny.write_rows(folder / "eval.jsonl", rows[8:14])
    return Inputs(folder)


@pytest.fixture(scope="module")
def recording(inputs: Inputs) -> Recording:
    """A run that others replay."""
    folder = inputs.folder / "recorded"
    more = ("--train.eval_every", "3", "--train.samples", "3", "--checkpoint.every", "null")
    return Recording(folder, inputs.run(folder, *STEPS, *more))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_every_rollout_is_a_file_of_the_run(inputs: Inputs, recording: Recording) -> None:
    files = ["1.arrow", "5.arrow", "eval-3.arrow", "eval-6.arrow"]
    assert names(recording.folder) == files
    rows = table(recording.folder / "rollouts" / "1.arrow")
    assert sorted(row["row"] for row in rows) == [
        f"{inputs.folder / 'train.jsonl'} line {number}" for number in range(1, 9)
    ]
    known = [json.loads(line) for line in (inputs.folder / "train.jsonl").open()]
    for row in rows:
        columns = json.loads(row["columns"])
        assert columns == known[int(row["row"].rsplit(" ", 1)[1]) - 1]
        assert row["step"] == 1
        assert len({*row["seeds"]}) == 4
        assert [len(ids) for ids in row["tokens"]] == [len(each) for each in row["logprobs"]]
        assert row["reward"] == row["reward/short"] == [-len({*ids}) for ids in row["tokens"]]
        ended = {"stop": lambda size: size <= 6, "length": lambda size: size == 6}
        assert all(
            ended[it](len(ids)) for it, ids in zip(row["finish"], row["tokens"], strict=True)
        )
    assert {"stop", "length"} == {reason for row in rows for reason in row["finish"]}
    # The rows of an evaluation are answered four at a time.
    held_out = table(recording.folder / "rollouts" / "eval-6.arrow")
    assert [row["step"] for row in held_out] == [6] * 6
    rewards = [row["reward"][0] for row in held_out]
    assert recording.metrics[-1]["eval/reward"] == pytest.approx(sum(rewards) / 6)


def test_samples_are_the_answers_with_the_highest_and_the_lowest_rewards(
    recording: Recording,
) -> None:
    shown = [json.loads(line) for line in (recording.folder / "samples.jsonl").open()]
    assert [sample["step"] for sample in shown] == [3, 3, 3, 6, 6, 6]
    which = ["highest reward 1", "highest reward 2", "lowest reward 1"]
    assert [sample["which"] for sample in shown[3:]] == which
    held_out = table(recording.folder / "rollouts" / "eval-6.arrow")
    rewards = sorted(row["reward"][0] for row in held_out)
    assert [sample["scores"] for sample in shown[3:]] == [
        [rewards[-1]], [rewards[-2]], [rewards[0]]
    ]  # fmt: skip
    by_row = {row["row"]: row for row in held_out}
    for sample in shown[3:]:
        assert sample["answers"] == by_row[sample["row"]]["text"]


def test_a_replayed_run_has_the_same_curve_to_the_last_bit(
    inputs: Inputs, recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_rollouts.embedded import Embedded

    write = Embedded.sample

    def only_in_evaluations(self: Any, engine: Any, *arguments: Any, **options: Any) -> Any:
        assert not engine.module.training, "recorded answers are not drawn again"
        return write(self, engine, *arguments, **options)

    monkeypatch.setattr(Embedded, "sample", only_in_evaluations)
    more = ("--train.eval_every", "3", "--rollouts.replay", str(recording.folder))
    replayed = inputs.run(tmp_path / "run", *STEPS, *more, "--checkpoint.every", "null")
    assert replayed == recording.metrics
    assert weights(tmp_path / "run") == weights(recording.folder)
    for name in names(recording.folder):
        copy = table(tmp_path / "run" / "rollouts" / name)
        assert copy == table(recording.folder / "rollouts" / name)


def test_a_run_that_stops_at_any_step_of_a_rollout_resumes_to_the_last_bit(
    inputs: Inputs, recording: Recording, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    straight = training(recording.metrics)
    for step in range(1, 7):
        # Each process takes one step.
        more = ("--resume",) * (step > 1) + ("--train.stop_at", str(step))
        metrics = inputs.run(folder, *STEPS, "--checkpoint.every", "1", *more)
        assert training(metrics) == straight[:step]
    assert weights(folder) == weights(recording.folder)
    for name in ("1.arrow", "5.arrow"):
        assert table(folder / "rollouts" / name) == table(recording.folder / "rollouts" / name)


LAG = (
    "--train.steps", "6", "--grpo.passes", "2", "--rollouts.lag", "1", "--grpo.preset", "grpo",
    "--grpo.kl.beta", "0.1",
)  # fmt: skip
"""Each rollout serves 2 steps."""


def test_a_run_with_a_lag_resumes_at_any_step_and_replays_to_the_last_bit(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, folder, replay = (tmp_path / name for name in ("whole", "run", "replay"))
    straight = inputs.run(whole, *LAG, "--checkpoint.every", "null")
    printed = capsys.readouterr().out
    assert printed.count(
        "\nrollouts   lag 1 saves no time with the engine embedded, which writes in the processes "
        "that train; a server writes while they do\n"
    ) == 1  # fmt: skip
    for step in (1, 2, 3, 4, 6):
        more = ("--resume",) * (step > 1) + ("--train.stop_at", str(step))
        metrics = inputs.run(folder, *LAG, "--checkpoint.every", "1", *more)
        assert training(metrics) == training(straight)[:step]
    replayed = inputs.run(replay, *LAG, "--rollouts.replay", str(whole), "--train.stop_at", "5")
    assert training(replayed) == training(straight)[:5]
    assert weights(folder) == weights(whole)
    versions = []
    for name in ("1.arrow", "3.arrow", "5.arrow"):
        rollout = table(whole / "rollouts" / name)
        assert table(folder / "rollouts" / name) == rollout
        assert table(replay / "rollouts" / name) == rollout
        versions += {row["version"] for row in rollout}
    assert versions == [0, 0, 2]
    # Answers of older weights have other probabilities now.
    largest = [line["sampling/sampling_logp_difference/max"] for line in training(straight)]
    assert max(largest[:2]) < 1e-4 < min(largest[2:])


def test_a_lag_without_a_correction_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error:
        inputs.run(tmp_path, "--rollouts.lag", "1", "--grpo.correction.kind", "none")
    assert str(error.value) == (
        "grpo.correction.kind none cannot be combined with rollouts.lag: older weights write the "
        "answers, and only a correction makes up for that; set it to truncate or mask"
    )


def test_a_lag_with_tools_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error:
        inputs.run(tmp_path, "--rollouts.lag", "1", "--grpo.tools", "tools.py:add")
    assert str(error.value) == (
        "grpo.tools cannot be combined with rollouts.lag, since answers of several turns are not "
        "written ahead; remove rollouts.lag"
    )


def test_a_resumed_run_removes_the_rollouts_after_its_checkpoint(
    inputs: Inputs, recording: Recording, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    inputs.run(folder, *STEPS, "--train.stop_at", "2", "--train.eval_every", "2")
    for name in ("5.arrow", "eval-4.arrow"):
        (folder / "rollouts" / name).write_bytes(b"of another attempt")
    inputs.run(folder, *STEPS, "--train.stop_at", "3", "--train.eval_every", "10", "--resume")
    assert names(folder) == ["1.arrow", "eval-2.arrow", "eval-3.arrow"]
    inputs.run(folder, *STEPS, "--train.stop_at", "5", "--rollouts.keep", "1", "--overwrite")
    assert names(folder) == ["5.arrow", "eval-5.arrow"]
    inputs.run(folder, *STEPS, "--train.stop_at", "1", "--rollouts.keep", "0", "--overwrite")
    assert not (folder / "rollouts").exists()


def test_the_answers_of_a_reward_that_fails_are_kept_until_they_are_scored(
    inputs: Inputs, recording: Recording, tmp_path: Path
) -> None:
    function, folder = tmp_path / "late.py", tmp_path / "run"
    scored = "    return [-len({*ids}) for ids in completion_ids]\n"
    fails = "    if others['trainer_state'].global_step == 4:\n        raise ValueError('late')\n"
    function.write_text(f"def short(completion_ids, **others):\n{fails}{scored}")
    more = (*STEPS, "--grpo.rewards", f"{function}:short", "--checkpoint.every", "1")
    with pytest.raises(RLHFError) as caught:
        inputs.run(folder, *more)
    kept = folder / "rollouts" / "5.unjudged.arrow"
    assert str(caught.value).startswith("reward 'short': raised ValueError: late (late.py:3) for ")
    assert str(caught.value).endswith(f" that it cannot score; the answers are in {kept}")
    assert "Traceback" in "".join(caught.value.__notes__)
    assert names(folder) == ["1.arrow", "5.unjudged.arrow"]
    scores = ("reward", "reward/short", "extra")
    rows = table(recording.folder / "rollouts" / "5.arrow")
    drawn = [{name: it for name, it in row.items() if name not in scores} for row in rows]
    assert table(kept) == drawn
    function.write_text(f"def short(completion_ids, **others):\n{scored}")
    inputs.run(folder, *more, "--resume")
    assert names(folder) == ["1.arrow", "5.arrow", "eval-6.arrow"]
    assert table(folder / "rollouts" / "5.arrow") == rows


def test_no_file_is_written_for_a_reward_that_fails_if_none_are_kept(
    inputs: Inputs, tmp_path: Path
) -> None:
    function, folder = tmp_path / "fails.py", tmp_path / "run"
    function.write_text("def fails(**others):\n    raise OSError('no space left')")
    with pytest.raises(RLHFError) as caught:
        inputs.run(folder, "--grpo.rewards", f"{function}:fails", "--rollouts.keep", "0")
    assert str(caught.value).endswith("return None for an answer that it cannot score")
    assert not (folder / "rollouts").exists()


def test_steps_report_how_long_their_rollout_was_written_and_scored(
    inputs: Inputs, tmp_path: Path
) -> None:
    function = tmp_path / "slow.py"
    function.write_text(
        "import time\n\n\ndef slow(completions, **others):\n    time.sleep(0.5)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    words = inputs.words(tmp_path / "run", *STEPS, "--grpo.rewards", f"{function}:slow")
    lines = tiny.run("grpo", words, str(inputs.folder / "cache"), True)
    *steps, evaluation = lines
    assert all(line["rollout/seconds"] > 0 and line["rewards/seconds"] > 0.5 for line in steps)
    # A rollout serves four steps, then two.
    assert len({line["rollout/seconds"] for line in steps}) == 2
    assert not any(name.endswith("/seconds") for name in evaluation)


def test_with_a_lag_steps_do_not_report_the_wait_for_answers(
    inputs: Inputs, tmp_path: Path
) -> None:
    words = inputs.words(tmp_path / "run", *STEPS, "--rollouts.lag", "1")
    *steps, _ = tiny.run("grpo", words, str(inputs.folder / "cache"), True)
    assert all(line["rewards/seconds"] > 0 and "rollout/seconds" not in line for line in steps)


@pytest.mark.parametrize("name", ["rewards/seconds", "sync/bytes"])
def test_a_reward_cannot_log_a_metric_of_time(name: str, inputs: Inputs, tmp_path: Path) -> None:
    function = tmp_path / "logs.py"
    function.write_text(
        "def logs(completions, log_metric, **others):\n"
        f"    log_metric({name!r}, 1.0)\n    return [0.0] * len(completions)\n"
    )
    with pytest.raises(RLHFError) as caught:
        inputs.run(tmp_path / "run", *STEPS, "--grpo.rewards", f"{function}:logs")
    assert str(caught.value) == (
        f"log_metric({name!r}): the trainer has a metric of this name; use another one"
    )


def refusal(inputs: Inputs, output: Path, *more: str) -> str:
    """The error of a run that has trained on nothing."""
    with pytest.raises(RLHFError) as caught:
        inputs.run(output, *STEPS, *more)
    metrics = output / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()
    return str(caught.value)


def test_rollouts_that_are_not_those_of_the_run_are_refused(
    inputs: Inputs, recording: Recording, tmp_path: Path
) -> None:
    source, output = recording.folder, tmp_path / "run"
    replay = ("--rollouts.replay", str(source))
    assert refusal(inputs, output, "--rollouts.replay", str(tmp_path)) == (
        f"rollouts.replay: {tmp_path / 'rollouts'} has no rollouts; choose the folder of a run"
    )
    assert refusal(inputs, output, *replay, "--train.steps", "9") == (
        f"rollouts.replay: {source / 'rollouts'} has no rollout for step 9 of 9; replay a run that "
        "has all of them, or set train.stop_at"
    )
    error = refusal(inputs, output, *replay, "--train.seed", "1")
    assert error.startswith(f"rollouts.replay: {source} has no answer to ")
    assert error.endswith(
        "; replay a run with the same rows, train.seed, batch.size and number of answers"
    )
    error = refusal(inputs, tmp_path / "longer", *replay, "--grpo.max_new_tokens", "5")
    assert " has an answer of 6 tokens to " in error
    assert error.endswith(", which may have 5; allow as many tokens as that run")
    rows = [json.loads(line) for line in (inputs.folder / "train.jsonl").open()]
    elsewhere = tiny.write_rows(tmp_path / "other.jsonl", [*rows[1:], rows[0]])
    error = refusal(inputs, tmp_path / "other", *replay, "--data.train", str(elsewhere))
    assert error.startswith(f"rollouts.replay: {source / 'rollouts' / '1.arrow'} answers another ")
    assert error.endswith("; replay a run with the same rows, tokenizer and chat template")


def test_a_row_whose_prompt_has_changed_is_named(
    inputs: Inputs, recording: Recording, tmp_path: Path
) -> None:
    train = inputs.folder / "train.jsonl"
    lines = train.read_text()
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")
    try:
        tiny.write_rows(train, [*rows[:6], rows[9], rows[7]])
        error = refusal(inputs, tmp_path / "run", "--rollouts.replay", str(recording.folder))
    finally:
        train.write_text(lines)
    file = recording.folder / "rollouts" / "1.arrow"
    assert error == (
        f"rollouts.replay: {file} answers another prompt than {train} line 7 has now; replay a run "
        "with the same rows, tokenizer and chat template"
    )


def test_a_run_says_how_large_its_rollouts_are(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    inputs.run(folder, *STEPS, "--train.stop_at", "1", "--train.samples", "1")
    printed = capsys.readouterr().out
    size = (folder / "rollouts" / "1.arrow").stat().st_size / 1e6
    assert (
        f"\nrollouts   {size:.2g} MB in {folder / 'rollouts' / '1.arrow'}; about "
        f"{size * 6 / 4:.2g} MB for all steps, which rollouts.keep limits\n"
    ) in printed
    assert printed.count("\nrollouts ") == 1
    assert "\nsample     " in printed
