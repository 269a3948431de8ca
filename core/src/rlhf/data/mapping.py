"""One batch of rows to one table of trees: what the tokenising processes run."""

import json
import reprlib
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
from attrs import frozen
from numpy.typing import NDArray

from rlhf.config.sections import DataConfig
from rlhf.data import trees
from rlhf.data.columns import Columns, OwnRow, errors_at
from rlhf.data.example import Answer, Example, ExampleMaker, longest_path
from rlhf.data.files import Source
from rlhf.data.images import BadImage, TreeImages
from rlhf.data.packing import PER_EXAMPLE, PER_TOKEN, kind_of, num_labels, num_predictions
from rlhf.data.rows import Row, RowReader
from rlhf.errors import RLHFError, counted


@frozen(eq=False)
class RowsToTrees:
    """Callable that turns one batch of rows into one table of trees."""

    source: Source
    numbers: NDArray[np.int64]
    data: DataConfig
    trainer: ExampleMaker
    reader: RowReader | None
    """Of the trainer's row format, if it names one."""

    def __call__(self, table: pa.Table, indices: Sequence[int]) -> pa.Table:
        numbers = [int(self.numbers[index]) for index in indices]
        columns = table.to_pylist()
        raw = [self.source.row(row, number) for row, number in zip(columns, numbers, strict=True)]
        rows: Sequence[Sequence[Any]] = [[OwnRow(row)] for _, row in raw]
        bad: dict[int, BadImage] = {}
        if self.reader is not None:
            rows = self.reader.read(raw, bad if self.data.bad_images == "drop" else None)
            if len(rows) != len(raw):
                name, given = self.trainer.row_format, counted(len(rows), "list")
                raise RLHFError(f"the row format {name} read {counted(len(raw), 'row')} as {given}")
        out, call = [], f"{type(self.trainer).__name__}.example()"
        for index, (made, number, read) in enumerate(zip(rows, numbers, columns, strict=True)):
            origin = {"row": number, "place": self.source.place(read, number)}
            with errors_at(raw[index][0], call):
                out += [self._tree(row) | origin for row in made]
            if index in bad:
                files = json.dumps(bad[index].files)
                out.append(trees.tree(status=trees.BAD_IMAGES) | origin | {"files": files})
            elif not made:
                out.append(trees.tree(status=trees.EMPTY) | origin)
        return trees.to_table(out)

    def _tree(self, item: Row | Columns) -> dict[str, Any]:
        images = item.images if isinstance(item, Row) else None
        tree = self._tree_with(item, images)
        if images:
            tree |= {"files": json.dumps(images.files), "images": "\n".join(images.lines)}
            tree["thumbnails"] = " ".join(images.thumbnails)
        return tree

    def _tree_with(self, item: Row | Columns, images: TreeImages | None) -> dict[str, Any]:
        example = self.trainer.example(item)
        written = self.trainer.needs_rollout()
        check_example(example, f"{type(self.trainer).__name__}.example()", written=written)
        before, labels_before = after, labels = num_predictions(example), num_labels(example)
        status = self._status(example)
        # A row is not cut through an image.
        if status == trees.TOO_LONG or (images and status == trees.CUT):
            return trees.tree(status=trees.TOO_LONG)
        if images:
            example = attrs.evolve(example, inputs={**example.inputs, **images.inputs(example)})
        if status == trees.CUT:
            example = _cut(example, self.data.max_tokens)
            after, labels = num_predictions(example), num_labels(example)
        labels_cut = labels_before - labels
        if not example.answers and example.prompt:
            return trees.tree(example, status=status)
        lost = any(was and not left for was, left in zip(before, after, strict=True))
        bare = any(not len(answer.tokens) for answer in example.answers)
        alike = status == trees.CUT and _alike(example)
        if lost or bare or alike or not sum(after) + labels:
            return trees.tree(status=trees.EMPTY, labels_cut=labels_cut)
        return trees.tree(
            example, status=status, predictions=sum(after), labels=labels, labels_cut=labels_cut
        )

    def _status(self, example: Example) -> int:
        """Return the status that an example has by its length. Raises RLHFError if it is too long
        and `data.too_long` is `error`."""
        path = longest_path(example)
        # An answer to a prompt has at least one token.
        if path + (not example.answers) <= self.data.max_tokens:
            return trees.KEPT
        if self.data.too_long == "error":
            with_answer = "" if example.answers else " and an answer"
            raise RLHFError(
                f"the row has {path} tokens{with_answer}, more than data.max_tokens "
                f"{self.data.max_tokens}; raise it or set data.too_long to drop or cut"
            )
        # The end of a prompt says what is asked, so a prompt without answers is not cut.
        drops = self.data.too_long == "drop" or not example.answers
        return trees.TOO_LONG if drops else trees.CUT


def _cut(example: Example, size: int) -> Example:
    """Return the example with every path cut at `size` tokens."""
    prompt = example.prompt[:size]
    room = size - len(prompt)
    answers = [
        Answer(a.tokens[:room], a.trained if a.trained is None else a.trained[:room])
        for a in example.answers
    ]
    values = {
        name: [row[:room] for row in value] if kind_of(value) == PER_TOKEN else value
        for name, value in example.values.items()
    }
    return Example(prompt, answers, values, example.inputs, example.columns)


def _alike(example: Example) -> bool:
    """Return whether the example has several answers and all of them are equal."""
    first, *others = (list(answer.tokens) for answer in example.answers)
    return bool(others) and all(answer == first for answer in others)


def check_example(example: Any, call: str, *, written: bool = False) -> None:
    """Raise RLHFError for an example that contradicts itself, which `call` returned. With `written`
    it may have no answers yet."""
    if not isinstance(example, Example):
        raise RLHFError(f"{call} returned {type(example).__name__} instead of an Example")
    if not example.answers and not written:
        raise RLHFError(f"{call} returned an Example without answers")
    sizes = [len(answer.tokens) for answer in example.answers]
    for number, answer in enumerate(example.answers):
        if answer.trained is not None and len(answer.trained) != sizes[number]:
            raise RLHFError(
                f"{call} returned an answer {number} with {sizes[number]} tokens but "
                f"{len(answer.trained)} values in `trained`"
            )
    for name, value in example.values.items():
        check_numbers(value, call, name)
        if hasattr(value, "__len__") and len(value) != len(sizes):
            raise RLHFError(
                f"{call} returned {len(value)} values {name!r} for {counted(len(sizes), 'answer')}"
            )
        if kind_of(value) == PER_TOKEN and [len(row) for row in value] != sizes:
            raise RLHFError(
                f"{call} returned {[len(row) for row in value]} values {name!r} for answers of "
                f"{sizes} tokens"
            )


def check_numbers(value: Any, call: str, name: str) -> None:
    """Raise RLHFError unless a value of an example is a number or lists of numbers. They are finite
    unless they are per token, where nan means that there is none."""
    try:
        kind = kind_of(value)
        parts = [np.asarray(part) for part in (value if kind == PER_TOKEN else [value])]
    except (TypeError, ValueError, LookupError):  # Such as a mapping, or a tensor on a device.
        kind, parts = PER_EXAMPLE, [np.empty(1, object)]
    num_dims = 0 if kind == PER_EXAMPLE else 1
    numeric = all(part.dtype.kind in "biuf" and part.ndim == num_dims for part in parts)
    if not numeric or not (kind == PER_TOKEN or np.isfinite(parts[0]).all()):
        raise RLHFError(
            f"{call} returned {reprlib.repr(value)} as the value {name!r}; return a finite number "
            "or a list of them"
        )
