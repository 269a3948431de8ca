"""A row format made of a function: what it may return, and its way into other processes."""

import pickle
from typing import Any

import pytest
from word_rows import TOKENIZER, WHERE

from rlhf.errors import RLHFError
from rlhf_rows import Columns, Reader, Unencoded, render_answers, render_text, row_format
from rlhf_rows.format import Format
from rlhf_rows.formats import preferences

PAIR = {"prompt": "say", "chosen": "one", "rejected": "two"}


def test_a_reader_is_the_same_in_another_process() -> None:
    reader = preferences.open(TOKENIZER)
    other = pickle.loads(pickle.dumps(reader))
    assert other.format is preferences
    assert other.read([(WHERE, PAIR)]) == reader.read([(WHERE, PAIR)])


def refusal(format: Format, row: Columns) -> str:
    with pytest.raises(RLHFError) as error:
        format.open(TOKENIZER).read([(WHERE, row)])
    text = str(error.value)
    assert text.startswith(f"{WHERE}: ")
    return text.removeprefix(f"{WHERE}: ")


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "NoneType"),
        ((["a"], len), "tuple"),
        ("text", "str"),
        ([1], "list"),
        ([("text", len)], "list"),
        ([(["text"], None)], "list"),
    ],
)
def test_what_is_no_list_of_pairs_is_told(returned: Any, kind: str) -> None:
    def read(row: Columns, reader: Reader) -> Any:
        return returned

    assert refusal(row_format(read), PAIR) == (
        f"{__name__}.{read.__qualname__} returned {kind}; return a list of pairs (texts, "
        "function), such as [(render_answers(...), partial(join_paths, row))]"
    )


@row_format
def graded(row: Columns, reader: Reader) -> list[Unencoded]:
    """A format that forgets to look at its columns."""
    return [(render_answers(row, reader, ["answer"], [row["answer"]]), len)]  # type: ignore[list-item]


def test_a_row_without_the_prompt_that_answers_need_is_told() -> None:
    assert refusal(graded, {"question": "say", "answer": "one"}) == (
        "a row needs `prompt`, but this one has `question`, `answer`; rename columns with "
        "`columns` in data"
    )


@pytest.mark.parametrize(("values", "kind"), [(("say", 4), "int"), ((None, "one"), "null")])
def test_only_text_is_plain_text(values: Any, kind: str) -> None:
    with pytest.raises(RLHFError) as error:
        render_text(*values)
    assert str(error.value) == f"a prompt and its answer must be text, not {kind}"
