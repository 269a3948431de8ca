"""Demo rows in the format `stepwise`."""

import re

from rlhf_demo import rows


def test_half_of_the_solutions_are_right_in_every_step() -> None:
    found = rows("arithmetic", "eval", "stepwise")
    assert len(found) == 200
    assert all(len(row["completions"]) == len(row["labels"]) for row in found)
    assert 70 < sum(all(row["labels"]) for row in found) < 130


def test_steps_are_wrong_from_the_first_number_that_differs_from_the_question() -> None:
    for row in rows("arithmetic", "eval", "stepwise"):
        signs = re.findall(r"[+-] \d+", row["prompt"])
        used = [re.findall(r"[+-] \d+", step)[0] for step in row["completions"][:-1]]
        same = [one == other for one, other in zip(signs, used, strict=True)]
        known = [all(same[: number + 1]) for number in range(len(same))]
        assert row["labels"] == [*known, all(same)]
