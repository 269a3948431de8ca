"""Which steps the rollouts of a folder serve, when they are written, and columns of rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.trainer import Example, Sample
from rlhf_rollouts import replaying
from rlhf_rollouts.files import Rollout, RolloutFiles, first_missing, read_columns
from rlhf_rollouts.judges import columns_of
from rlhf_rollouts.rewards import Scores


@pytest.mark.parametrize(
    ("steps", "serves", "last", "missing"),
    [
        ([1, 2, 3], 1, 3, None),
        ([1, 3], 1, 3, 2),
        ([2, 3], 1, 3, 1),
        ([1, 2], 1, 3, 3),
        ([1, 5, 7], 4, 10, None),  # An epoch of six steps.
        ([1, 5], 4, 9, 9),
        ([1, 9], 4, 6, 5),
        ([1, 2, 3], 1, 2, None),
    ],
)
def test_the_first_step_without_a_rollout_is_found(
    steps: list[int], serves: int, last: int, missing: int | None
) -> None:
    assert first_missing(steps, serves, last) == missing


def test_an_evaluation_is_a_file_when_all_of_its_rows_are_there(tmp_path: Path) -> None:
    examples = [Example([number], [], row=f"row {number}") for number in range(4)]
    run: Any = SimpleNamespace(
        config=SimpleNamespace(rollouts=SimpleNamespace(keep=None, replay=None)),
        folder=tmp_path, examples=([], examples), on_rank_zero=lambda act, share: act(),
    )  # fmt: skip
    files, found = RolloutFiles(run), []
    for start in (0, 2):
        total = np.zeros(2)
        files.write(
            Rollout(
                examples=examples[start : start + 2], groups=[[Sample([7], [0.0])]] * 2,
                texts=["a", "b"], scores=Scores({"one": total}, total, {}, {}), step=3,
                seeds=[1, 2], training=False,
            )
        )  # fmt: skip
        found.append([path.name for path in tmp_path.rglob("*.arrow")])
    assert found == [[], ["eval-3.arrow"]]


def test_answers_of_an_evaluation_whose_reward_fails_are_kept_with_those_before(
    tmp_path: Path,
) -> None:
    examples = [Example([number], [], row=f"row {number}") for number in range(4)]
    run: Any = SimpleNamespace(
        config=SimpleNamespace(rollouts=SimpleNamespace(keep=None, replay=None)), folder=tmp_path,
        examples=([], examples), on_rank_zero=lambda act, share=True: act(),
    )  # fmt: skip
    files, total = RolloutFiles(run), np.zeros(2)
    first, second = (
        Rollout(
            examples=part, groups=[[Sample([7], [0.0])]] * 2, texts=["a", "b"], scores=scores,
            step=3, seeds=[1, 2], training=False,
        )
        for part, scores in (
            (examples[:2], Scores({"one": total}, total, {"extra": [1, 2]}, {})),
            (examples[2:], None),
        )
    )  # fmt: skip
    files.write(first)
    with pytest.raises(SameOnAllRanks) as caught, files.kept_if_unjudged(second):
        raise SameOnAllRanks("reward 'one': failed")
    kept = tmp_path / "rollouts" / "eval-3.unjudged.arrow"
    assert str(caught.value) == f"reward 'one': failed; the answers are in {kept}"
    table = read_columns(kept, "row", "text", "reward", "extra")
    assert table.to_pydict() == {
        "row": [f"row {number}" for number in range(4)], "text": [["a"], ["b"]] * 2
    }  # fmt: skip


def test_a_column_that_the_first_row_lacks_is_known() -> None:
    rows = [Example([1], [], columns=columns) for columns in ({"a": 1}, {"a": 1, "tests": "x"})]
    assert columns_of(rows, {"a"}) == {"a"}
    assert columns_of(rows, {"tests"}) == columns_of(rows, {"other"}) == {"a", "tests"}


def test_the_engine_that_replays_is_not_chosen_by_name() -> None:
    config: Any = SimpleNamespace(rollouts=SimpleNamespace(engine="recorded"))
    assert replaying.check is not None
    with pytest.raises(RLHFError) as caught:
        replaying.check(config)
    assert str(caught.value) == ("rollouts.engine recorded is what rollouts.replay uses; remove it")
