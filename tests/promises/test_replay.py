"""Rollouts that a run has recorded give the same curve on other ranks and ZeRO stages."""

from pathlib import Path

import pytest

import rlhf_demo
from rlhf_devkit import layouts, run, tiny
from rlhf_devkit.curves import same_curve, training, without_timings
from rlhf_devkit.ranks import Ranks

OWN = {"grpo": ("--grpo.truncated", "count", "--grpo.filter", "none"), "ppo": ()}


def words_of(trainer: str) -> list[str]:
    shared = {"batches": "2", "passes": "2", "answers": "4", "max_new_tokens": "8"}
    settings = [word for name in shared for word in (f"--{trainer}.{name}", shared[name])]
    return ["--train.steps", "4", "--checkpoint.every", "null", *settings, *OWN[trainer]]


@pytest.mark.parametrize("trainer", ["grpo", pytest.param("ppo", marks=pytest.mark.matrix)])
def test_recorded_rollouts_give_one_curve_on_other_ranks_and_stages(
    trainer: str, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")[:8]
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def few(completion_ids, **columns):\n    return [-len({*ids}) for ids in completion_ids]\n"
    )
    train = tiny.write_rows(tmp_path / "train.jsonl", rows)
    model = tiny.make_model(tmp_path / "model", ends_answers=True)
    common = [
        "--model", str(model), "--model.dtype", "fp32", "--data.train", str(train),
        "--data.workers", "0", "--batch.size", "4", "--data.max_tokens", "64",
        "--optim.lr", "3e-3", f"--{trainer}.rewards", f"{rewards}:few", *words_of(trainer),
    ]  # fmt: skip

    def metrics(ranks: Ranks, name: str, stage: str, *more: str) -> list[dict[str, float]]:
        words = [*common, *layouts()[stage], "--output", str(tmp_path / name), *more]
        lines, *_ = ranks.run(run, trainer, words, str(tmp_path / "cache"))
        return without_timings(lines)

    recorded = metrics(one, "recorded", "stage 0")
    assert len({line["loss"] for line in recorded}) > 2
    replay = ("--rollouts.replay", str(tmp_path / "recorded"))
    assert metrics(one, "again", "stage 0", *replay) == recorded
    for ranks, name, stage in (
        (one, "one-3", "stage 3"),
        (two, "two-0", "stage 0"),
        (two, "two-3", "stage 3"),
    ):
        other = metrics(ranks, name, stage, *replay)
        same_curve(other, recorded)
        for line, expected in zip(training(other), training(recorded), strict=True):
            assert line == pytest.approx(expected, abs=1e-4, rel=1e-4)
