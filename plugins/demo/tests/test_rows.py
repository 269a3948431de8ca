"""The problems and the rows that are made of them, the base model, and the table of a demo."""

import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from rlhf.errors import RLHFError
from rlhf_demo import FORMATS, arithmetic, base_model_folder, print_before_and_after, records, rows


def test_the_table_of_a_demo_leaves_out_damaged_lines_and_needs_an_evaluation_of_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0, "eval/loss": 2}\n{"step": 1\n{"step": 2, "eval/loss": 1}\n')
    print_before_and_after(tmp_path, "held-out rows", {"loss": ("loss", "8.1f")})
    assert capsys.readouterr().out == (
        "\nheld-out rows   before    after\nloss               2.0      1.0\n"
    )
    metrics.write_text('{"step": 2, "eval/loss": 1}\n')
    print_before_and_after(tmp_path, "held-out rows", {"loss": ("loss", "8.1f")})
    assert capsys.readouterr().out == ""


def test_the_embedded_model_is_small() -> None:
    assert sum(path.stat().st_size for path in base_model_folder().iterdir()) < 2_000_000


def test_the_problems_are_right_and_always_the_same() -> None:
    problems = list(arithmetic.problems("eval"))
    assert problems == list(arithmetic.problems("eval"))
    for problem in problems:
        expression = "".join(re.findall(r"[\d+ -]", problem.question))
        assert eval(expression) == problem.answer
        for step in problem.steps[:-1]:
            left, right = step.split(" = ")
            assert eval(left) == int(right)


def test_no_problem_is_in_both_splits() -> None:
    def expressions(split: str) -> set[str]:
        return {re.sub(r"[^\d+-]", "", item.question) for item in arithmetic.problems(split)}

    assert not expressions("train") & expressions("eval")


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_rows(format: str) -> None:
    found = rows("arithmetic", "eval", format)
    assert len(found) == 200
    if format == "unpaired":
        assert 70 < Counter(row["label"] for row in found)[True] < 130
    if format == "preference":
        assert all(row["chosen"] != row["rejected"] for row in found)


def test_an_error_is_one_wrong_result_which_later_steps_continue_from() -> None:
    draw = random.Random(0)
    for problem in islice(arithmetic.problems("eval"), 50):
        wrong, place = arithmetic.with_a_slip(problem, draw)
        for number, step in enumerate(wrong.steps[:-1]):
            left, right = step.split(" = ")
            assert (eval(left) == int(right)) == (number != place)


def test_ranked_answers_are_the_solution_its_steps_a_guess_and_another_answer() -> None:
    for row, problem in zip(
        rows("ranked", "eval", "preference"), arithmetic.problems("eval"), strict=True
    ):
        by_rank = dict(zip(row["ranks"], row["answers"], strict=True))
        assert by_rank[1] == problem.solution == f"{by_rank[2]}\n{problem.steps[-1]}"
        assert by_rank[3].startswith("The answer is ")
        assert by_rank[3] != problem.steps[-1]
        assert by_rank[4] != problem.solution


def test_the_demo_has_no_rows_for_a_trainer_without_a_row_format() -> None:
    with pytest.raises(RLHFError) as error:
        rows("arithmetic", "train", "raw")
    assert str(error.value) == (
        "demo:arithmetic has no rows for a trainer without a row_format; give data.train files of "
        "your own (in tests: rows)"
    )


@pytest.mark.parametrize("name", ["arithmetic", "base", "equations", "ranked", "sums"])
def test_every_record_has_the_rows_of_its_name_and_the_one_model(name: str) -> None:
    record = getattr(records, name)
    assert record.model_folder() == base_model_folder()
    assert record.settings("dpo") == {}
    if name == "base":
        with pytest.raises(RLHFError) as error:
            record.rows("eval", "preference")
        assert str(error.value) == "demo:base has no preference rows; use demo:arithmetic"
        return
    format = "prompt" if name == "sums" else "preference"
    assert record.rows("eval", format) == rows(name, "eval", format)
