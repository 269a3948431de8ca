"""Rows become examples: several processes, weights, values and counts."""

import pickle
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numbered_words import ROWS, Raw, Section, examples_of, ids, write_lines

from rlhf.config.sections import DataEntry
from rlhf.data.example import Example
from rlhf.data.examples import Report
from rlhf.errors import RLHFError

pytestmark = pytest.mark.usefixtures("cache")


def test_trees_values_and_counts_are_read_back_unchanged(tmp_path: Path) -> None:
    examples = examples_of(
        write_lines(tmp_path / "rows.jsonl", [{"number": n} for n in range(3)]), trainer=Raw
    )
    tree = examples[2]
    assert list(tree.prompt) == [2, 2, 2]
    assert [list(a.tokens) for a in tree.answers] == [[3, 4, 5], [6]]
    assert [np.asarray(a.trained).tolist() for a in tree.answers] == [[False, True, True], [True]]
    assert tree.values["margin"] == 1.0
    assert list(tree.values["rank"]) == [1.0, 2.0]
    assert [np.nan_to_num(row, nan=-1).tolist() for row in tree.values["label"]] == [
        [-1, 1, 0.5],
        [-1],
    ]
    assert {name: array.tolist() for name, array in tree.inputs.items()} == {
        "pixels": [[2]],
        "image": [[1.0, 1.0]],
    }
    assert examples.value_kinds == {"label": "token", "margin": "example", "rank": "answer"}
    assert {name: count.tolist() for name, count in examples.counts.items()} == {
        "examples": [1, 1, 1],
        "answers": [2, 2, 2],
        "tokens": [3, 3, 3],
        "labels": [2, 2, 2],
    }
    assert examples.lengths.tolist() == [5, 6, 7]
    assert examples.longest_path.tolist() == [4, 5, 6]
    again = pickle.loads(pickle.dumps(examples))
    assert list(again[1].prompt) == [2, 2]


def test_several_processes_give_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    rows = [{"text": f"w{n % 40} w{n % 7}"} for n in range(4100)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    examples = examples_of(path, data={"processes": 2})
    single = examples_of(path, data={"processes": 1}, section=Section(beta=0.2))
    assert [list(e.answers[0].tokens) for e in examples] == [
        list(e.answers[0].tokens) for e in single
    ]
    assert examples.row_numbers.tolist() == list(range(4100))


def test_an_error_in_a_worker_process_reads_like_any_other(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "w1"} for _ in range(4100)]
    rows[4000] = {"nothing": 1}
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(RLHFError) as caught:
        examples_of(path, data={"processes": 2})
    assert str(caught.value) == (
        f"{path} line 4001: a row needs `messages`, `text`, or `prompt` and `completion`, "
        "but this one has `nothing`; rename columns with `columns` in data"
    )


def test_a_weight_below_one_draws_a_share_by_the_seed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl")
    entry = DataEntry(path=path, weight=0.3)
    first, second, other = examples_of(entry), examples_of(entry), examples_of(entry, seed=5)
    assert len(first) == 3
    assert first.row_numbers.tolist() == second.row_numbers.tolist()
    assert first.row_numbers.tolist() != other.row_numbers.tolist()


def test_a_weight_above_one_takes_rows_again_and_sources_are_mixed(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", ROWS[:4])
    two = write_lines(tmp_path / "two.jsonl", ROWS[4:])
    examples = examples_of(DataEntry(path=one, weight=2.5), two)
    assert len(examples) == 10 + 6
    assert [prompt[0] for prompt, _ in ids(examples)][:8] == [2, 3, 4, 5] * 2
    assert examples.name(0) == f"{one} line 1"
    assert examples.name(15) == f"{two} line 6"
    assert examples.report.rows == 10


def test_the_row_of_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", ROWS[:4])
    two = write_lines(tmp_path / "two.jsonl", ROWS[4:])
    examples = examples_of(DataEntry(path=one, weight=2.5), two)
    # Row n is prompt n + 2, answer n + 2, n + 3, end.
    assert examples.first_beyond(13) is None
    assert examples.first_beyond(12) == (f"{two} line 6", 12)
    assert examples.first_beyond(5) == (f"{one} line 3", 5)
    assert examples.first_beyond(4) == (f"{one} line 2", 4)


def test_computed_values_belong_to_new_examples(tmp_path: Path) -> None:
    examples = examples_of(write_lines(tmp_path / "rows.jsonl", ROWS[:2]))
    columns = [[[[0.5, 1.5, 2.5]], [[3.5, 4.5, 5.5]]]]
    more = examples.with_values("score", columns)
    assert more.value_kinds == {"score": "token"}
    assert examples.value_kinds == {}
    assert examples[1].values == {}
    for complete in (more, pickle.loads(pickle.dumps(more))):
        assert complete[1].values == {"score": [[3.5, 4.5, 5.5]]}


def test_a_value_per_example_is_read_after_other_values(tmp_path: Path) -> None:
    class Named(Raw):
        def example(self, row: Any) -> Example:
            example = super().example(row)
            return attrs.evolve(example, values={**example.values, "weight": row["number"] * 3.0})

    path = write_lines(tmp_path / "rows.jsonl", [{"number": n} for n in range(3)])
    examples = examples_of(path, trainer=Named)
    assert examples.value("margin").tolist() == [0.0, 0.5, 1.0]
    assert examples.value("weight").tolist() == [0.0, 3.0, 6.0]


def test_values_per_token_next_to_trained_tokens_are_not_called_labels() -> None:
    report = Report(rows=2, examples=2, tokens=9, trained=4, labels=12, labels_cut=1)
    assert str(report) == (
        "2 rows; 2 examples of 9 tokens; 4 trained on, 44.4 %; 12 per-token values; "
        "1 per-token value cut off, 7.7 %"
    )
