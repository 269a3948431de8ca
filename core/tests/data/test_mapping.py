"""Trainers that read rows of their own format, and errors of a trainer's `example`."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from numbered_words import Demonstrations, Raw, examples_of, write_lines

from rlhf.config.sections import DataEntry
from rlhf.data.example import Answer, Example
from rlhf.errors import RLHFError
from rlhf_rows import encode
from rlhf_rows.format import FormatReader

pytestmark = pytest.mark.usefixtures("cache")


class Questions(Raw):
    """Encodes raw rows as the row formats do."""

    def example(self, row: Any) -> Example:
        encoded = encode(self.tokenizer, row["question"], *row["replies"], tools=row.get("tools"))
        return Example(encoded.prompt, encoded.answers)


def test_encode_tokenises_as_the_row_formats_do(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ 'w39 ' }}{% endif %}{% for m in messages %}{{ m.content + ' ' }}"
        "{% if m.role == 'assistant' %}{{ '</s> ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w38 ' }}{% endif %}"
    )
    talk = [{"role": "user", "content": "w1"}]
    said = [{"role": "assistant", "content": "w3"}]
    pairs = [
        {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4 w5"},
        {"prompt": talk, "chosen": said, "rejected": "w4", "tools": [{"name": "add"}]},
        {"prompt": "w1", "chosen": "w3 " * 9, "rejected": "w4"},
    ]
    questions = [
        {"question": row["prompt"], "replies": [row["chosen"], row["rejected"]]}
        | ({"tools": row["tools"]} if "tools" in row else {})
        for row in pairs
    ]

    class Pairs(Demonstrations):
        row_format = "preference"

    settings: dict[str, Any] = {"template": template, "data": {"max_tokens": 9, "too_long": "cut"}}
    core = examples_of(write_lines(tmp_path / "pairs.jsonl", pairs), trainer=Pairs, **settings)
    mine = examples_of(
        write_lines(tmp_path / "mine.jsonl", questions), trainer=Questions, **settings
    )
    assert [tree_of(example) for example in mine] == [tree_of(example) for example in core]
    assert (mine.report.cut, core.report.cut) == (1, 1)


def tree_of(example: Example) -> tuple[list[int], list[tuple[list[int], Any]]]:
    answers = [
        (list(a.tokens), None if a.trained is None else list(a.trained)) for a in example.answers
    ]
    return list(example.prompt), answers


def test_a_row_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    for replies, message in [
        ([], "a row needs at least one answer"),
        ([3], "`answers[0]` must be text or a list of messages, not int"),
        (
            [[{"role": "assistant", "content": "w1"}]],
            "this is a conversation, but the tokenizer has no chat template; "
            "set data.chat_template to a file or to chatml",
        ),
    ]:
        path = write_lines(tmp_path / "rows.jsonl", [{"question": "w0", "replies": replies}])
        with pytest.raises(RLHFError) as caught:
            examples_of(path, trainer=Questions)
        assert str(caught.value) == f"{path} line 1: {message}"


def test_a_wrong_tree_is_an_error_with_the_trainer_and_the_row(tmp_path: Path) -> None:
    class Wrong(Raw):
        def example(self, row: Any) -> Example:
            return attrs.evolve(super().example(row), values={"rank": [1.0]})

    path = write_lines(tmp_path / "rows.jsonl", [{"number": 1}])
    with pytest.raises(RLHFError) as caught:
        examples_of(path, trainer=Wrong)
    assert str(caught.value) == (
        f"{path} line 1: Wrong.example() returned 1 values 'rank' for 2 answers"
    )


def test_returning_no_example_is_an_error_with_the_trainer_and_the_row(tmp_path: Path) -> None:
    class Wrong(Raw):
        def example(self, row: Any) -> Any:
            return None

    path = write_lines(tmp_path / "rows.jsonl", [{"number": 1}])
    with pytest.raises(RLHFError) as caught:
        examples_of(path, trainer=Wrong)
    assert str(caught.value) == (
        f"{path} line 1: Wrong.example() returned NoneType instead of an Example"
    )


def test_the_row_on_which_a_trainer_raises_is_named(tmp_path: Path) -> None:
    class Picky(Raw):
        def example(self, row: Any) -> Any:
            if row["number"] == 1:
                raise RLHFError("`number` is 1")
            return row["question"] if row["number"] == 2 else row["number"] / 0

    with pytest.raises(RLHFError) as caught:
        examples_of(write_lines(tmp_path / "one.jsonl", [{"number": 1}]), trainer=Picky)
    assert str(caught.value) == f"{tmp_path}/one.jsonl line 1: `number` is 1"
    with pytest.raises(RLHFError) as caught:
        examples_of(write_lines(tmp_path / "two.jsonl", [{"number": 2}]), trainer=Picky)
    assert str(caught.value) == (
        f"{tmp_path}/two.jsonl line 1: a row needs `question`, but this one has `number`; rename "
        "columns with `columns` in data"
    )
    with pytest.raises(ZeroDivisionError) as other:
        examples_of(write_lines(tmp_path / "three.jsonl", [{"number": 3}]), trainer=Picky)
    assert other.value.__notes__ == [f"Picky.example() failed with {tmp_path}/three.jsonl line 1"]


def test_a_trainer_may_expect_that_a_column_is_missing(tmp_path: Path) -> None:
    class Lenient(Raw):
        def example(self, row: Any) -> Example:
            try:
                return super().example({"number": row["count"]})
            except KeyError:
                return super().example(row)

    assert (
        len(examples_of(write_lines(tmp_path / "a.jsonl", [{"number": 1}]), trainer=Lenient)) == 1
    )


def test_columns_of_own_rows_are_renamed_and_answers_without_tokens_drop_a_row(
    tmp_path: Path,
) -> None:
    class Odd(Raw):
        def example(self, row: Any) -> Example:
            return super().example(row) if row["number"] % 2 else Example([], [Answer([])])

    path = write_lines(tmp_path / "rows.jsonl", [{"count": number} for number in range(4)])
    entry = DataEntry(path=path, columns={"number": "count"})
    found = examples_of(entry, trainer=Odd)
    assert [example.values["margin"] for example in found] == [0.5, 1.5]
    assert found.report.empty == 2


def test_a_reader_that_loses_a_row_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FormatReader.read
    monkeypatch.setattr(FormatReader, "read", lambda self, *rows: read(self, *rows)[1:])
    lines = write_lines(tmp_path / "rows.jsonl", [{"prompt": "w1", "completion": "w2"}] * 2)
    with pytest.raises(RLHFError) as caught:
        examples_of(lines, trainer=Demonstrations)
    assert str(caught.value) == "the row format demonstration read 2 rows as 1 list"
