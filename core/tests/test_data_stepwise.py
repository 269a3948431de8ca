"""Stepwise rows: where steps end, what their labels are, and errors with the row's name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_of as small_tokenizer
from word_rows import WHERE, Section, made, read, refusal, texts, user

from rlhf.data.examples import Report
from rlhf.data.formats import read_rows
from rlhf.data.stepwise import label_per_token
from rlhf.data.tokens import Reader
from rlhf.errors import RLHFError

STEPS = {"prompt": "say", "completions": ["one two", "three"], "labels": [True, 0.25]}


def test_steps_are_joined_by_the_separator_and_labelled_at_its_last_token() -> None:
    (row,) = read("stepwise", Section(), **STEPS)
    assert texts(row) == ["say", "[one] [two] [;] [three] [;]"]
    assert row.columns["ends"] == [2, 4]
    assert row.columns["labels"] == [1.0, 0.25]
    shown = [None if math.isnan(value) else value for value in label_per_token(row)]
    assert shown == [None, None, 1.0, None, 0.25]


def test_a_separator_of_several_tokens_ends_with_the_label() -> None:
    (row,) = read("stepwise", Section(separator=" ; . "), **STEPS)
    assert texts(row)[1] == "[one] [two] [;] [.] [three] [;] [.]"
    assert row.columns["ends"] == [3, 6]


def test_without_a_separator_a_step_ends_with_its_last_token() -> None:
    (row,) = read("stepwise", Section(separator=""), **STEPS)
    assert texts(row)[1] == "[one] [two] [three]"
    assert row.columns["ends"] == [1, 2]


def test_with_a_placeholder_steps_end_with_it_and_the_separator_comes_between() -> None:
    section = Section(placeholder=" <step>")
    (row,) = read("stepwise", section, **STEPS)
    assert texts(row)[1] == "[one] [two] [<step>] [;] [three] [<step>]"
    assert row.columns["ends"] == [2, 5]
    for columns in ({"completion": "one two <step>; three <step>"}, {"prompt": None}):
        written = {**STEPS, "completions": None, **columns}
        written["text"] = None if "completion" in columns else "say one two <step>; three <step>\n"
        (marked,) = read("stepwise", section, **written)
        ids = [*marked.prompt, *marked.answers[0].tokens]
        assert ids == [*row.prompt, *row.answers[0].tokens]
        ends = [len(marked.prompt) + end for end in marked.columns["ends"]]
        assert ends == [3, 6]
        assert marked.columns["labels"] == [1.0, 0.25]


def test_text_after_the_last_placeholder_is_kept_without_a_label() -> None:
    section = Section(placeholder="<step>")
    (row,) = read("stepwise", section, text="say one <step> two", labels=[0])
    assert texts(row) == ["", "[say] [one] [<step>] [two]"]
    assert row.columns["ends"] == [2]


def test_the_prompt_of_steps_may_be_a_conversation() -> None:
    (row,) = read("stepwise", Section(), **{**STEPS, "prompt": [user("say")]})
    assert texts(row) == ["<user> say <assistant>", "[one] [two] [;] [three] [;]"]


def test_a_step_without_a_known_label_is_not_labelled() -> None:
    (row,) = read("stepwise", Section(), **{**STEPS, "labels": [None, 1]})
    assert math.isnan(row.columns["labels"][0])
    assert row.columns["labels"][1] == 1.0


def test_a_byte_pair_never_crosses_the_end_of_a_step() -> None:
    for kind in ("bytes", "blank"):
        tokenizer = small_tokenizer(kind)
        reader = Reader(tokenizer)
        columns = {"prompt": "What is two", "completions": ["one.", "two."], "labels": [1, 0]}
        ((row,),) = read_rows("stepwise", [(WHERE, columns)], reader)
        tokens = row.answers[0].tokens
        first, second = row.columns["ends"]
        assert tokens[first] == tokens[second]
        assert tokenizer.decode(tokens[: first + 1]) == "one.\n"
        assert row.prompt == tokenizer("What is two")["input_ids"]


STEPWISE_NEEDS = (
    "a row needs `prompt`, `completions` and `labels`, but this one has {}; "
    "rename columns with `columns` in data"
)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"completions": ["one"]}, STEPWISE_NEEDS.format("`completions`")),
    ({"prompt": "say", "labels": [1]}, STEPWISE_NEEDS.format("`prompt`, `labels`")),
    (
        {**STEPS, "labels": [1]},
        "1 label for 2 steps; give one per step, null if unknown",
    ),
    ({**STEPS, "labels": 1}, "`labels` must be a list, not int"),
    (
        {**STEPS, "labels": [1, "good"]},
        "label 1 is 'good'; use true, false, null or a number from 0 (wrong) to 1 (right)",
    ),
    (
        {**STEPS, "labels": [1, -1]},
        "label 1 is -1; use true, false, null or a number from 0 (wrong) to 1 (right)",
    ),
    ({**STEPS, "completions": "one"}, "`completions` must be a list of steps, not text"),
    (
        {**STEPS, "completions": ["one", 2]},
        "step 1 of `completions` must be text, not int",
    ),
    (
        {**STEPS, "completions": [], "labels": []},
        "`completions` has no steps; remove the row",
    ),
    (
        {"text": "one <step>", "labels": [1]},
        "`text` holds the steps as one text; set placeholder in the trainer's section to the text "
        "that ends each step",
    ),
]


@pytest.mark.parametrize(("columns", "message"), REFUSED)
def test_a_wrong_row_is_named_with_what_to_do(columns: dict[str, Any], message: str) -> None:
    assert refusal("stepwise", **columns) == message


def test_steps_without_a_mark_or_a_token_are_refused() -> None:
    section = Section(placeholder="<step>")
    assert refusal("stepwise", section, text="one . two", labels=[1]) == (
        "`text` does not contain the placeholder '<step>'; set placeholder to the text that ends "
        "each step"
    )
    empty = {**STEPS, "completions": ["one", ""]}
    assert refusal("stepwise", Section(separator=""), **empty) == (
        "step 1 is empty; remove it and its label"
    )


@pytest.fixture
def path(tmp_path: Path, cache: Path) -> Path:
    return tmp_path / "rows.jsonl"


LONG = [STEPS, {**STEPS, "completions": ["one", "two " * 20]}, {**STEPS, "prompt": "say " * 9}]


def test_labels_that_are_cut_off_are_counted(path: Path) -> None:
    examples = made("stepwise", LONG, path, max_tokens=8, too_long="cut")
    assert [int(np.isfinite(example.values["label"][0]).sum()) for example in examples] == [2, 1]
    assert examples.counts["labels"].tolist() == [2, 1]
    assert str(examples.report) == (
        "3 rows; 1 too long (cut), 33.3 %; 1 with nothing to train on (dropped), 33.3 %; "
        "2 examples of 14 tokens; 3 labels; 3 labels cut off, 50.0 %"
    )
    assert examples.report.lost["cut"] == (f"{path} line 2",)
    assert examples.report.lost["empty"] == (f"{path} line 3",)


def test_values_per_token_next_to_trained_tokens_are_not_called_labels() -> None:
    report = Report(rows=2, examples=2, tokens=9, trained=4, labels=12, labels_cut=1)
    assert str(report) == (
        "2 rows; 2 examples of 9 tokens; 4 trained on, 44.4 %; 12 per-token values; "
        "1 per-token value cut off, 7.7 %"
    )


def test_rows_that_are_too_long_are_dropped_or_an_error(path: Path) -> None:
    examples = made("stepwise", LONG, path, max_tokens=8)
    assert str(examples.report) == (
        "3 rows; 2 too long (dropped), 66.7 %; 1 example of 6 tokens; 2 labels"
    )
    with pytest.raises(RLHFError) as caught:
        made("stepwise", LONG, path, max_tokens=8, too_long="error")
    assert str(caught.value) == (
        f"{path} line 2: the row has 24 tokens, more than data.max_tokens 8; raise it or set "
        "data.too_long to drop or cut"
    )
