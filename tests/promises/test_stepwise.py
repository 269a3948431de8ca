"""Stepwise rows: where steps end, what their labels are, and errors with the row's name."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_of as small_tokenizer
from damaged_rows import READERS, USER, check, damaged_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from word_rows import OfFormat, made, read, refusal, texts, user

from rlhf.errors import RLHFError
from rlhf.trainer import Example, Examples
from rlhf_demo import base_model_folder
from rlhf_plugin_prm.config import PRMConfig
from rlhf_plugin_prm.stepwise import label_per_token, stepwise
from rlhf_rows import read_row

STEPS = {"prompt": "say", "completions": ["one two", "three"], "labels": [True, 0.25]}
MARKED = PRMConfig(separator=";")


class NoSeparator:
    """A section of another trainer."""

    separator = ""


class Labelled(OfFormat):
    """Takes the rows with their labels."""

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers, {"label": [label_per_token(row)]})


def test_steps_are_joined_by_the_separator_and_labelled_at_its_last_token() -> None:
    (row,) = read("stepwise", MARKED, **STEPS)
    assert texts(row) == ["say", "[one] [two] [;] [three] [;]"]
    assert row.columns["ends"] == [2, 4]
    assert row.columns["labels"] == [1.0, 0.25]
    shown = [None if math.isnan(value) else value for value in label_per_token(row)]
    assert shown == [None, None, 1.0, None, 0.25]


def test_a_separator_of_several_tokens_ends_with_the_label() -> None:
    (row,) = read("stepwise", PRMConfig(separator=" ; . "), **STEPS)
    assert texts(row)[1] == "[one] [two] [;] [.] [three] [;] [.]"
    assert row.columns["ends"] == [3, 6]


def test_without_a_separator_a_step_ends_with_its_last_token() -> None:
    (row,) = read("stepwise", NoSeparator(), **STEPS)
    assert texts(row)[1] == "[one] [two] [three]"
    assert row.columns["ends"] == [1, 2]


def test_with_a_placeholder_steps_end_with_it_and_the_separator_comes_between() -> None:
    section = PRMConfig(separator=";", placeholder=" <step>")
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
    section = PRMConfig(separator=";", placeholder="<step>")
    (row,) = read("stepwise", section, text="say one <step> two", labels=[0])
    assert texts(row) == ["", "[say] [one] [<step>] [two]"]
    assert row.columns["ends"] == [2]


def test_the_prompt_of_steps_may_be_a_conversation() -> None:
    (row,) = read("stepwise", MARKED, **{**STEPS, "prompt": [user("say")]})
    assert texts(row) == ["<user> say <assistant>", "[one] [two] [;] [three] [;]"]


def test_a_step_without_a_known_label_is_not_labelled() -> None:
    (row,) = read("stepwise", MARKED, **{**STEPS, "labels": [None, 1]})
    assert math.isnan(row.columns["labels"][0])
    assert row.columns["labels"][1] == 1.0


def test_a_byte_pair_never_crosses_the_end_of_a_step() -> None:
    for kind in ("bytes", "blank"):
        tokenizer = small_tokenizer(kind)
        columns = {"prompt": "What is two", "completions": ["one.", "two."], "labels": [1, 0]}
        (row,) = read_row(stepwise, columns, tokenizer)
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
    assert refusal("stepwise", MARKED, **columns) == message


def test_steps_without_a_mark_or_a_token_are_refused() -> None:
    section = PRMConfig(separator=";", placeholder="<step>")
    assert refusal("stepwise", section, text="one . two", labels=[1]) == (
        "`text` does not contain the placeholder '<step>'; set placeholder to the text that ends "
        "each step"
    )
    empty = {**STEPS, "completions": ["one", ""]}
    assert refusal("stepwise", NoSeparator(), **empty) == (
        "step 1 is empty; remove it and its label"
    )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "rows.jsonl"


def made_of_long_rows(path: Path, **data: Any) -> Examples:
    return made("stepwise", LONG, path, trainer=Labelled, section=MARKED, max_tokens=8, **data)


LONG = [STEPS, {**STEPS, "completions": ["one", "two " * 20]}, {**STEPS, "prompt": "say " * 9}]


def test_labels_that_are_cut_off_are_counted(path: Path) -> None:
    examples = made_of_long_rows(path, too_long="cut")
    assert [int(np.isfinite(example.values["label"][0]).sum()) for example in examples] == [2, 1]
    assert examples.counts["labels"].tolist() == [2, 1]
    assert str(examples.report) == (
        "3 rows; 1 too long (cut), 33.3 %; 1 with nothing to train on (dropped), 33.3 %; "
        "2 examples of 14 tokens; 3 labels; 3 labels cut off, 50.0 %"
    )
    assert examples.report.lost["cut"] == (f"{path} line 2",)
    assert examples.report.lost["empty"] == (f"{path} line 3",)


def test_rows_that_are_too_long_are_dropped_or_an_error(path: Path) -> None:
    examples = made_of_long_rows(path)
    assert str(examples.report) == (
        "3 rows; 2 too long (dropped), 66.7 %; 1 example of 6 tokens; 2 labels"
    )
    with pytest.raises(RLHFError) as caught:
        made_of_long_rows(path, too_long="error")
    assert str(caught.value) == (
        f"{path} line 2: the row has 24 tokens, more than data.max_tokens 8; raise it or set "
        "data.too_long to drop or cut"
    )


BASES: list[tuple[str, dict[str, Any]]] = [
    ("stepwise", {"prompt": [USER], "completions": ["one", "and one"], "labels": [1, None]}),
    ("stepwise", {"prompt": "two", "completion": "one <s> two <s>", "labels": [0.5, True]}),
]


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(damaged_rows(BASES), st.sampled_from(READERS))
def test_any_value_at_any_place_is_read_or_refused(
    damaged: tuple[str, dict[str, Any]], reader: Any
) -> None:
    check(*damaged, reader)


def test_a_system_text_beside_the_steps_is_the_prompts_system_message() -> None:
    system = {"role": "system", "content": "be kind"}
    steps = {"completions": ["one"], "labels": [1]}
    (beside,) = read("stepwise", MARKED, prompt="What is two?", system="be kind", **steps)
    (inside,) = read("stepwise", MARKED, prompt=[system, USER], **steps)
    assert texts(beside) == texts(inside)


SHARED = Path(__file__).parents[4] / "shared" / "data" / "prm"


@pytest.mark.skipif(not SHARED.exists(), reason="the shared rows are not here")
@pytest.mark.parametrize("name", ["bigbench_mistake", "prmbench", "gsm8k_derived"])
def test_real_steps_end_at_the_separator(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model_folder())
    for line in (SHARED / f"{name}.eval.jsonl").read_text().splitlines()[:100]:
        raw = json.loads(line)
        (row,) = read_row(stepwise, raw, tokenizer)
        assert tokenizer.decode(row.prompt) == raw["prompt"]
        assert row.columns["labels"] == [float(label) for label in raw["labels"]]
        start = 0
        for step, end in zip(raw["completions"], row.columns["ends"], strict=True):
            assert tokenizer.decode(row.answers[0].tokens[start : end + 1]) == step + "\n"
            start = end + 1
