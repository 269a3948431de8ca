"""The first thing a newcomer sees: `rlhf run sft` without arguments."""

import io
import random
import re
from collections import Counter
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path

import attrs
import pytest

import sft_runs
from rlhf.commands.main import main
from rlhf.demo import FORMATS, arithmetic, base_model_folder, print_before_and_after, rows
from rlhf.errors import RLHFError
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf_devkit import Ranks
from rlhf_devkit.plain import PlainBackend
from rlhf_plugin_deepspeed.config import check, resolve
from sft_runs import Inputs


def demo_in(folder: str, cache: str) -> tuple[int, str]:
    """`rlhf run sft` in a folder, in a rank of the pool: exit code and output."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as output,
    ):
        patch.chdir(folder)
        patch.delenv("RANK")
        patch.setenv("RLHF_CACHE", cache)
        return main(["run", "sft"]), output.getvalue()


def test_the_demo_trains_and_shows_what_was_learnt(tmp_path: Path, one: Ranks) -> None:
    ((code, output),) = one.run(demo_in, str(tmp_path), str(tmp_path / "cache"), timeout=3000)
    assert code == 0
    assert "demo: the embedded model and rows" in output.splitlines()[0]
    loss = re.search(r"loss per token +([\d.]+) +([\d.]+)", output)
    exact = re.search(r"right answers, of 100 +(\d+) +(\d+)", output)
    assert loss is not None
    assert exact is not None
    assert float(loss[2]) < 0.5 * float(loss[1])
    assert int(exact[1]) < 10
    assert int(exact[2]) > 50
    assert output.count("\n> ") == 3
    assert (tmp_path / "runs" / "sft-1" / "model" / "model.safetensors").is_file()


def test_a_report_that_fails_does_not_fail_the_finished_run(
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(inputs.cache))
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "1")
    request = read_config("sft", overrides=words)
    plugin = attrs.evolve(request.plugin, report="json:loads")
    run_rank(attrs.evolve(request, demo=True, plugin=plugin), backend=PlainBackend())
    written = tmp_path / "run" / "errors" / "report.txt"
    assert capsys.readouterr().out.splitlines()[-1] == (
        "report     failed: TypeError: loads() takes 1 positional argument but 2 were given; "
        f"see {written}"
    )
    assert written.read_text().startswith("Traceback (most recent call last):")


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


@pytest.mark.parametrize("trainer", ["sft", "dpo", "rm", "kd", "kto", "prm", "grpo", "ppo", "ilql"])
@pytest.mark.parametrize("words", [["--deepspeed", "zero2"], ["--deepspeed.stage", "2"]], ids=str)
def test_a_demo_runs_under_the_stage_that_is_given(trainer: str, words: list[str]) -> None:
    config = read_config(trainer, overrides=words).config
    check(config)
    assert resolve(config.backend_section).stage == 2


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


@pytest.mark.parametrize("format", [*FORMATS, "stepwise"])
def test_every_format_has_rows(format: str) -> None:
    found = rows("arithmetic", "eval", format)
    assert len(found) == 200
    if format == "unpaired":
        assert 70 < Counter(row["label"] for row in found)[True] < 130
    if format == "stepwise":
        assert all(len(row["completions"]) == len(row["labels"]) for row in found)
        assert 70 < sum(all(row["labels"]) for row in found) < 130
    if format == "preference":
        assert all(row["chosen"] != row["rejected"] for row in found)


def test_an_error_is_one_wrong_result_which_later_steps_continue_from() -> None:
    draw = random.Random(0)
    for problem in islice(arithmetic.problems("eval"), 50):
        wrong, place = arithmetic.with_a_slip(problem, draw)
        for number, step in enumerate(wrong.steps[:-1]):
            left, right = step.split(" = ")
            assert (eval(left) == int(right)) == (number != place)


def test_steps_are_wrong_from_the_first_number_that_differs_from_the_question() -> None:
    for row in rows("arithmetic", "eval", "stepwise"):
        signs = re.findall(r"[+-] \d+", row["prompt"])
        used = [re.findall(r"[+-] \d+", step)[0] for step in row["completions"][:-1]]
        same = [one == other for one, other in zip(signs, used, strict=True)]
        known = [all(same[: number + 1]) for number in range(len(same))]
        assert row["labels"] == [*known, all(same)]


def test_ranked_answers_are_the_solution_its_steps_a_guess_and_another_answer() -> None:
    for row, problem in zip(
        rows("ranked", "eval", "preference"), arithmetic.problems("eval"), strict=True
    ):
        by_rank = dict(zip(row["ranks"], row["answers"], strict=True))
        assert by_rank[1] == problem.solution == f"{by_rank[2]}\n{problem.steps[-1]}"
        assert by_rank[3].startswith("The answer is ")
        assert by_rank[3] != problem.steps[-1]
        assert by_rank[4] != problem.solution


def test_an_unknown_demo_is_refused() -> None:
    with pytest.raises(RLHFError) as error:
        rows("geometry", "train", "demonstration")
    assert str(error.value).startswith(
        "demo 'geometry' is not installed; available: arithmetic, base, equations, ranked, sums"
    )


def test_the_demo_has_no_rows_for_a_trainer_without_a_row_format() -> None:
    with pytest.raises(RLHFError) as error:
        rows("arithmetic", "train", "raw")
    assert str(error.value) == (
        "demo:arithmetic has no rows for a trainer without a row_format; give data.train files of "
        "your own (in tests: rows)"
    )
