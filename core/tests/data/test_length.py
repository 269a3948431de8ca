"""Rows that are too long or empty are dropped, cut or refused, and counted."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from numbered_words import ROWS, Demonstrations, Raw, Section, examples_of, ids, write_lines

from rlhf.data.example import Example
from rlhf.errors import RLHFError
from rlhf.train.dataset import Dataset

pytestmark = pytest.mark.usefixtures("cache")


def long_rows(path: Path) -> str:
    long = " ".join(["w1"] * 20)
    rows = [ROWS[0], {"prompt": "w0", "completion": long}, {"prompt": long, "completion": "w0"}]
    return write_lines(path, rows)


def test_long_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    path = long_rows(tmp_path / "rows.jsonl")
    examples = examples_of(path, data={"max_tokens": 10})
    assert len(examples) == 1
    assert str(examples.report) == (
        "3 rows; 2 too long (dropped), 66.7 %; 1 example of 4 tokens; 3 trained on, 75.0 %"
    )
    assert examples.report.lost == {"too_long": (f"{path} line 2", f"{path} line 3")}


def test_long_rows_are_cut_at_the_end_without_an_eos_over_the_last_token(tmp_path: Path) -> None:
    path = long_rows(tmp_path / "rows.jsonl")
    examples = examples_of(path, data={"max_tokens": 10, "too_long": "cut"})
    assert ids(examples)[1] == ([2], [3] * 9)
    assert (examples.report.cut, examples.report.empty) == (1, 1)
    assert examples.longest_path.max() == 10


class Prompts(Demonstrations):
    """Takes prompts to which the run writes answers."""

    row_format = "prompt"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers, columns={"gold": row.columns.get("gold")})

    def rollout(self, examples: Any, step: int, seeds: Any) -> Any: ...


def test_prompts_are_kept_with_their_columns_and_are_never_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "w0 w1", "gold": "x"}, {"prompt": ""}, {"prompt": " ".join(["w2"] * 20)}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    examples = examples_of(path, trainer=Prompts, data={"max_tokens": 10, "too_long": "cut"})
    (example,) = examples
    assert (list(example.prompt), list(example.answers)) == ([2, 3], [])
    assert example.columns == {"gold": "x"}
    # An answer has at least one token.
    (exact,) = examples_of(path, trainer=Prompts, data={"max_tokens": 3})
    assert list(exact.prompt) == [2, 3]
    with pytest.raises(RLHFError, match="line 1: the row has 2 tokens and an answer, more than"):
        examples_of(path, trainer=Prompts, data={"max_tokens": 2, "too_long": "error"})
    assert str(examples.report) == (
        "3 rows; 1 too long (dropped), 33.3 %; 1 with nothing to train on (dropped), 33.3 %; 1 "
        "example of 2 tokens"
    )
    made = Prompts(None, None).rollout_shape(examples, 8)
    assert (len(made.prompt), [len(answer.tokens) for answer in made.answers]) == (2, [6])


def test_prompts_need_a_trainer_with_a_rollout(tmp_path: Path) -> None:
    class Silent(Prompts):
        def needs_rollout(self) -> bool:
            return False

    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "w0"}])
    with pytest.raises(RLHFError) as caught:
        examples_of(path, trainer=Silent)
    assert (
        str(caught.value) == f"{path} line 1: Silent.example() returned an Example without answers"
    )


def test_a_tree_is_dropped_if_an_answer_has_lost_its_trained_tokens(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"number": 0}])
    examples = examples_of(path, trainer=Raw, data={"max_tokens": 3, "too_long": "cut"})
    assert [list(answer.tokens) for answer in examples[0].answers] == [[3, 4], [6]]
    with pytest.raises(RLHFError, match="1 with nothing to train on"):
        examples_of(path, trainer=Raw, data={"max_tokens": 2, "too_long": "cut"})


def test_a_long_row_can_be_an_error(tmp_path: Path) -> None:
    path = long_rows(tmp_path / "rows.jsonl")
    with pytest.raises(RLHFError) as caught:
        examples_of(path, data={"max_tokens": 10, "too_long": "error"})
    assert str(caught.value) == (
        f"{path} line 2: the row has 22 tokens, more than data.max_tokens 10; "
        "raise it or set data.too_long to drop or cut"
    )


def test_data_without_anything_to_train_on_names_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"text": ""}, {"text": " ".join(["w1"] * 99)}])
    with pytest.raises(RLHFError) as caught:
        examples_of(path)
    assert str(caught.value) == (
        "data.train: no trainable rows left of 2: 1 longer than data.max_tokens 64 "
        f"({path} line 2), 1 with nothing to train on ({path} line 1)"
    )


def test_an_example_over_the_budget_names_the_least_sufficient_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [*ROWS, {"text": "w1 w2 w3 w4 w5 w6 w7"}])
    with pytest.raises(RLHFError) as caught:
        examples_of(path, batch={"tokens": 6})
    assert str(caught.value) == (
        f"{path} line 11: the example has 8 tokens, more than batch.tokens 6; "
        "set batch.tokens to at least 8 or lower data.max_tokens"
    )


def test_a_warning_says_what_to_do_if_many_rows_are_lost(tmp_path: Path) -> None:
    long = {"prompt": "w0", "completion": "w1 " * 20}
    few = examples_of(write_lines(tmp_path / "few.jsonl", [*ROWS, long]), data={"max_tokens": 10})
    assert few.report.warning("train") is None
    path = write_lines(tmp_path / "many.jsonl", [*ROWS, long, long, {"text": ""}])
    dropped = examples_of(path, data={"max_tokens": 10}).report
    assert dropped.warning("train") == (
        "data.train: 23.1 % of the rows are dropped or cut; raise data.max_tokens for 2 longer "
        "rows, or set data.too_long to cut; check the row with nothing to train on with "
        "`rlhf inspect`"
    )
    cut = examples_of(path, data={"max_tokens": 10, "too_long": "cut"}).report
    assert cut.warning("eval") == (
        "data.eval: 23.1 % of the rows are dropped or cut; raise data.max_tokens for 2 longer "
        "rows; check the row with nothing to train on with `rlhf inspect`"
    )


def test_the_first_lines_of_a_run_warn_of_lost_rows(tmp_path: Path) -> None:
    long = {"prompt": "w0", "completion": "w1 " * 20}
    train = examples_of(write_lines(tmp_path / "train.jsonl"))
    held_out = examples_of(
        write_lines(tmp_path / "eval.jsonl", [*ROWS, long, long]), data={"max_tokens": 10}
    )
    trainer = Demonstrations(Section(), None)
    assert Dataset(trainer=trainer, train=train, eval=None, day=date.today()).warnings() == []
    assert Dataset(trainer=trainer, train=train, eval=held_out, day=date.today()).warnings() == [
        "warning    data.eval: 16.7 % of the rows are dropped or cut; raise data.max_tokens for 2 "
        "longer rows, or set data.too_long to cut"
    ]


def test_a_single_row_is_one_row_in_messages(tmp_path: Path) -> None:
    row = {"prompt": "w0", "completion": "w1 " * 20}
    cut = examples_of(
        write_lines(tmp_path / "rows.jsonl", [row]), data={"max_tokens": 10, "too_long": "cut"}
    ).report
    assert str(cut).startswith("1 row; 1 too long (cut), 100.0 %; 1 example of 10 tokens; ")
    assert cut.warning("train") == (
        "data.train: 100.0 % of the rows are dropped or cut; raise data.max_tokens for 1 longer row"
    )
