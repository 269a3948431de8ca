"""One batch of rows becomes one table of trees: what the tokenising processes run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlhf.config.sections import DataConfig
from rlhf.data import trees
from rlhf.data.convert import converted
from rlhf.data.example import Answer, Example
from rlhf.data.files import LINE, Source
from rlhf.data.formats import format_of
from rlhf.data.packing import PER_TOKEN, kind_of
from rlhf.data.rows import RawRow, Reader, Row
from rlhf.data.trees import Tree
from rlhf.errors import RLHFError
from rlhf.trainer import Trainer


class RowsToTrees:
    """One batch of rows to one table of trees."""

    def __init__(
        self,
        source: Source,
        numbers: NDArray[np.int64],
        data: DataConfig,
        trainer: Trainer,
        reader: Reader,
    ) -> None:
        self.source, self.numbers, self.data = source, numbers, data
        self.trainer, self.reader = trainer, reader

    def __call__(self, table: pa.Table, indices: Sequence[int]) -> pa.Table:
        numbers = [int(self.numbers[index]) for index in indices]
        columns = table.to_pylist()
        lines = [row.get(LINE, 0) if self.source.has_lines else 0 for row in columns]
        raw = [
            converted(self.source.row(row, number), self.source.entry.convert)
            for row, number in zip(columns, numbers, strict=True)
        ]
        made = iter(self._rows([row for rows in raw for row in rows]))
        out: list[Tree] = []
        for rows, number, line in zip(raw, numbers, lines, strict=True):
            found = [self._tree(row, number, line, item) for row in rows for item in next(made)]
            out += found or [Tree(number, line, trees.EMPTY, Example([], []))]
        return trees.to_table(out)

    def _rows(self, raw: Sequence[RawRow]) -> Sequence[Sequence[Row | Mapping[str, Any]]]:
        if self.trainer.row_format is None:
            return [[row.columns] for row in raw]
        return format_of(self.trainer.row_format)(raw, self.reader)

    def _tree(self, raw: RawRow, number: int, line: int, item: Row | Mapping[str, Any]) -> Tree:
        example = self.trainer.example(item)
        _check_example(example, raw.where, type(self.trainer).__name__)
        path = len(example.prompt) + max(len(answer.tokens) for answer in example.answers)
        status = trees.KEPT
        before, labels_before = _predictions(example), _labels(example)
        if path > self.data.max_tokens:
            if self.data.too_long == "error":
                raise RLHFError(
                    f"{raw.where}: the row has {path} tokens but data.max_tokens is "
                    f"{self.data.max_tokens}: "
                    "raise it, or set data.too_long to drop or cut"
                )
            if self.data.too_long == "drop":
                return Tree(number, line, trees.TOO_LONG, Example([], []))
            example, status = _cut(example, self.data.max_tokens), trees.CUT
        after = _predictions(example)
        labels = _labels(example)
        lost = any(was and not left for was, left in zip(before, after, strict=True))
        bare = any(not len(answer.tokens) for answer in example.answers)
        alike = status == trees.CUT and _alike(example)
        if lost or bare or alike or not sum(after) + labels:
            return Tree(
                number, line, trees.EMPTY, Example([], []), labels_cut=labels_before - labels
            )
        return Tree(number, line, status, example, sum(after), labels, labels_before - labels)


def _cut(example: Example, most: int) -> Example:
    """The example with every path cut at its end; nothing is written over what is left."""
    prompt = example.prompt[:most]
    room = most - len(prompt)
    answers = [
        Answer(
            answer.tokens[:room],
            answer.trained if answer.trained is None else answer.trained[:room],
        )
        for answer in example.answers
    ]
    values = {
        name: [row[:room] for row in value] if kind_of(value) == PER_TOKEN else value
        for name, value in example.values.items()
    }
    return Example(prompt, answers, values, example.inputs)


def _alike(example: Example) -> bool:
    """Whether several answers are left of which none differs."""
    first, *others = (list(answer.tokens) for answer in example.answers)
    return bool(others) and all(answer == first for answer in others)


def _predictions(example: Example) -> list[int]:
    """Of each answer the trained tokens that have a token before them."""
    counts = []
    for answer in example.answers:
        mask = answer.trained
        count = len(answer.tokens) if mask is None else int(sum(mask))
        first = not len(example.prompt) and len(answer.tokens) and (mask is None or mask[0])
        counts.append(count - bool(first))
    return counts


def _labels(example: Example) -> int:
    """Values per token that are given."""
    per_token = [value for value in example.values.values() if kind_of(value) == PER_TOKEN]
    return sum(
        int((~np.isnan(np.asarray(row, float))).sum()) for value in per_token for row in value
    )


def _check_example(example: Example, where: str, trainer: str) -> None:
    """What only the author of a trainer can break, told with the row on which it breaks."""
    problem = ""
    if not example.answers:
        problem = "no answer"
    for number, answer in enumerate(example.answers):
        if answer.trained is not None and len(answer.trained) != len(answer.tokens):
            marks, tokens = len(answer.trained), len(answer.tokens)
            problem = f"{marks} marks for the {tokens} tokens of answer {number}"
    for name, value in example.values.items():
        if hasattr(value, "__len__") and len(value) != len(example.answers):
            problem = f"{len(value)} values {name!r} for {len(example.answers)} answers"
        elif kind_of(value) == PER_TOKEN:
            for row, answer in zip(value, example.answers, strict=True):
                if len(row) != len(answer.tokens):
                    problem = f"{len(row)} values {name!r} for {len(answer.tokens)} tokens"
    if problem:
        raise RLHFError(f"{where}: {trainer}.example gave {problem}")
