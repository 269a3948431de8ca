"""What every trainer has to prove, rollouts as files, and the advantages by hand."""

from typing import Any

import numpy as np
import pytest
from rlhf_trainer_group_clip.trainer import GroupClip

from rlhf_devkit import TrainerConformance, column
from rlhf_rollouts.on_policy import Judged

LETTERS = "[{{function: format, options: {{pattern: '.*[a-h].*[a-h].*'}}}}]"
"""A reward that a random model gets for some of its answers; the kit formats its words."""


class TestGroupClip(TrainerConformance):
    trainer = "group_clip"
    words = (
        "--group_clip.rewards", LETTERS, "--group_clip.answers", "4", "--group_clip.passes", "2",
        "--group_clip.max_new_tokens", "6", "--data.max_tokens", "64",
    )  # fmt: skip
    others = {
        "rewards": [{"function": "repetition", "options": {"size": 1}}], "answers": 3,
        "max_new_tokens": 4, "temperature": 0.7, "stop": "[aeiou]", "batches": 2, "passes": 1,
        "correction": {"high": 1.0000001}, "clip": 0.001,
    }  # fmt: skip
    without_effect = {
        "eval": "it is about held-out prompts", "agreement": "it is a bound that ends a run",
        "deadline": "it only ends what hangs", "tools": "a model with random weights calls none",
        "workers": "scores do not depend on who computes them",
    }  # fmt: skip

    def test_a_replay_at_another_budget_has_the_same_losses(self, bench: Any) -> None:
        losses = column(bench.plain(), "loss")
        rollouts = bench.folder / "plain" / "rollouts"
        assert len([*rollouts.glob("[0-9]*.arrow")]) == len(losses) / 2
        more = ("--rollouts.replay", str(rollouts.parent), "--batch.tokens", str(bench.longest))
        replayed = bench.plain("replay", *more)
        assert column(replayed, "loss") == pytest.approx(losses, abs=1e-5)


def test_an_advantage_is_over_the_mean_of_the_scored_answers() -> None:
    rewards = np.array([[1.0, 0.0, np.nan], [np.nan] * 3])
    trainer = object.__new__(GroupClip)
    first, second = trainer.values(Judged(groups=[], by_name={}, total=rewards))
    assert first["advantage"].tolist() == [0.5, -0.5, 0.0]
    assert second["advantage"].tolist() == [0.0, 0.0, 0.0]
