"""The tokenised rows of a run as a sequence of examples, with their sizes and counts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, overload

import attrs
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from rlhf.config.field_docs import documented
from rlhf.data.example import Example
from rlhf.data.packing import PER_TOKEN
from rlhf.data.trees import TreeFile, open_files
from rlhf.errors import RLHFError, counted

NAMED_ROWS = 5
MANY_LOST = 0.1
"""Share of the rows that may be dropped or cut without a warning."""


@frozen(kw_only=True)
class Report:
    """Counts of the rows and of what they became; `str` returns one line."""

    rows: int
    """Rows read, after limit and sampling."""
    examples: int
    """Examples made of them; rows taken several times count once."""
    too_long: int = 0
    """Dropped because a path is longer than `data.max_tokens`."""
    cut: int = 0
    """Cut at `data.max_tokens`; included in `examples`."""
    empty: int = 0
    """Dropped because nothing in them is trained on."""
    bad_images: int = 0
    """Dropped because an image cannot be used."""
    split: int = 0
    """Conversations that became several examples."""
    tokens: int = 0
    """Tokens of all trees; a prompt counts once."""
    trained: int = 0
    """Tokens that the loss predicts."""
    labels: int = 0
    """Values per token that are not nan, such as a label at the end of each step."""
    labels_cut: int = 0
    """Labels that were cut off."""
    lost: Mapping[str, tuple[str, ...]] = field(factory=dict)
    """Names of the first few rows that were `too_long`, `cut`, `empty` or had `bad_images`."""

    def warning(self, which: str) -> str | None:
        """Return a warning if many rows of `data.WHICH` were dropped or cut, with the remedy."""
        lost = self.too_long + self.cut + self.empty + self.bad_images
        if lost <= MANY_LOST * self.rows:
            return None
        long, share = self.too_long + self.cut, _percent(min(lost, self.rows), self.rows)
        advice = []
        if long:
            cut = "" if self.cut else ", or set data.too_long to cut"
            advice.append(f"raise data.max_tokens for {counted(long, 'longer row')}{cut}")
        if self.empty:
            rows = "the row" if self.empty == 1 else f"the {self.empty:,} rows"
            advice.append(f"check {rows} with nothing to train on with `rlhf inspect`")
        if self.bad_images:
            rows = counted(self.bad_images, "row")
            advice.append(f"set data.bad_images to error to see what is wrong with {rows}")
        return f"data.{which}: {share} of the rows are dropped or cut; {'; '.join(advice)}"

    def __str__(self) -> str:
        parts = [counted(self.rows, "row")]
        for count, what in (
            (self.too_long, "too long (dropped)"),
            (self.cut, "too long (cut)"),
            (self.empty, "with nothing to train on (dropped)"),
            (self.bad_images, "with bad images (dropped)"),
            (self.split, "split into several examples"),
        ):
            if count:
                parts.append(f"{count:,} {what}, {_percent(count, self.rows)}")
        parts.append(f"{counted(self.examples, 'example')} of {counted(self.tokens, 'token')}")
        if self.trained or not self.examples:
            parts.append(f"{self.trained:,} trained on, {_percent(self.trained, self.tokens)}")
        # Next to tokens that the loss predicts, they may be anything, such as advantages.
        noun = "per-token value" if self.trained else "label"
        if self.labels:
            parts.append(counted(self.labels, noun))
        if self.labels_cut:
            cut = _percent(self.labels_cut, self.labels + self.labels_cut)
            parts.append(f"{counted(self.labels_cut, noun)} cut off, {cut}")
        return "; ".join(parts)

    def __add__(self, other: "Report") -> "Report":
        names = [*self.lost, *(name for name in other.lost if name not in self.lost)]
        both = {n: (self.lost.get(n, ()) + other.lost.get(n, ()))[:NAMED_ROWS] for n in names}
        sums = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in attrs.fields(Report)
            if item.name != "lost"
        }
        return Report(**sums, lost=both)


@frozen
class Part:
    """The examples of one entry of `data.train` or `data.eval`."""

    file: Path
    source: str
    """What the names of its rows begin with, for error texts."""
    take: NDArray[np.int64]
    """Numbers of the file's examples, in order; a number may occur several times."""


@documented
class Packable(Protocol):
    """A sequence of examples whose sizes are known without reading them."""

    lengths: NDArray[np.int64]
    """Tokens of each packed tree [n]."""
    longest_path: NDArray[np.int64]
    """Tokens of each tree's longest path [n]."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Example: ...


class Examples(Sequence[Example]):
    """All examples of a run. Reading one copies nothing; pickling keeps the paths of its files."""

    def __init__(
        self, parts: Sequence[Part], report: Report, computed: Mapping[str, Any] | None = None
    ) -> None:
        """`computed` holds further values per token by name: for each part something that gives a
        list of one array per answer for the number of an example in the part's file."""
        self.report = report
        self._parts = tuple(parts)
        self._computed = dict(computed or {})
        self.files = open_files([part.file for part in parts])
        """The files of tokenised rows, in the order of the entries."""
        self._part = np.repeat(np.arange(len(parts)), [len(part.take) for part in parts])
        self._place = np.concatenate([part.take for part in parts])
        self.lengths = self._column("length")
        """Tokens of each packed tree [n]."""
        self.longest_path = self._column("path")
        """Tokens of each tree's longest path [n]."""
        self.counts: dict[str, NDArray[np.int64]] = {
            "examples": np.ones(len(self), np.int64),
            "answers": self._column("answers"),
            "tokens": self._column("predictions"),
            "labels": self._column("labels"),
        }
        """For each example what a term of the loss may be averaged over [n]."""
        self.row_numbers = self._column("row")
        """Row of its file that each example came from [n], from 0."""
        self.prompt_lengths = self._joined(lambda file: file.prompt_lengths)
        """Tokens of each example's prompt [n]."""
        self.sources = self._part * (1 + int(self.row_numbers.max())) + self.row_numbers
        """A number for each file and row [n]: equal for examples made of one row."""
        self.value_kinds = {**self._kinds(), **dict.fromkeys(self._computed, PER_TOKEN)}
        """What each value is per: `example`, `answer` or `token`."""

    def __len__(self) -> int:
        return len(self._place)

    @overload
    def __getitem__(self, number: int) -> Example: ...
    @overload
    def __getitem__(self, number: slice) -> list[Example]: ...
    def __getitem__(self, number: int | slice) -> Example | list[Example]:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        # numpy's arrays take negative numbers as a list does.
        part, place = self._part[number], int(self._place[number])
        example = self.files[part][place]
        if not self._computed:
            return example
        more = {name: columns[part][place] for name, columns in self._computed.items()}
        return attrs.evolve(example, values={**example.values, **more})

    def with_values(self, name: str, columns: Sequence[Any]) -> "Examples":
        """Return these examples with one more value per token, as `computed` describes."""
        return Examples(self._parts, self.report, {**self._computed, name: columns})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._parts, self.report, self._computed)

    def name(self, number: int) -> str:
        """Return where an example came from: path and line, or row."""
        return self._parts[self._part[number]].source + self._text("place", number)

    @property
    def with_inputs(self) -> NDArray[np.bool_]:
        """Whether each example has inputs of its own [n], such as images."""
        return self.input_bytes > 0

    @cached_property
    def input_bytes(self) -> NDArray[np.int64]:
        """Bytes of each example's own inputs [n]."""
        return self._joined(lambda file: file.input_bytes).astype(np.int64)

    def images(self, number: int) -> list[str]:
        """Return a line about each image of the row of an example."""
        return self._text("images", number).splitlines()

    def thumbnails(self, number: int) -> list[str]:
        """Return small pictures of the images of the row of an example, as data URLs."""
        return self._text("thumbnails", number).split()

    def names(self, numbers: Iterable[int]) -> str:
        """Return where several examples came from, the first few by name."""
        chosen = list(numbers)
        shown = ", ".join(self.name(number) for number in chosen[:NAMED_ROWS])
        more = len(chosen) - NAMED_ROWS
        return f"{shown} and {more} more" if more > 0 else shown

    def first_beyond(self, vocabulary: int) -> tuple[str, int] | None:
        """Return where the first example with a token id of at least `vocabulary` came from, and
        that id."""
        if all(file.largest_token() < vocabulary for file in self.files):
            return None
        tokens = (
            (number, int(token))
            for number, example in enumerate(self)
            for part in (example.prompt, *(answer.tokens for answer in example.answers))
            for token in part
        )
        number, token = next(each for each in tokens if each[1] >= vocabulary)
        return self.name(number), token

    def value(self, name: str) -> NDArray[np.float32]:
        """Return a value per example [n]."""
        return self._joined(lambda file: file.value(name))

    def _text(self, name: str, number: int) -> str:
        """Return a text of the row of an example, by its name in `trees.TEXTS`."""
        return self.files[self._part[number]].text(name, int(self._place[number]))

    def _column(self, name: str) -> NDArray[np.int64]:
        return self._joined(lambda file: file.column(name))

    def _joined(self, column: Callable[[TreeFile], NDArray[Any]]) -> NDArray[Any]:
        """Return a column of all files, in the order of the examples."""
        pairs = zip(self.files, self._parts, strict=True)
        return np.concatenate([column(file)[part.take] for file, part in pairs])

    def _kinds(self) -> dict[str, str]:
        kinds = [kind for file in self.files for kind in file.kinds]
        for kind in kinds[1:]:
            if kind != kinds[0]:
                raise RLHFError(
                    f"the rows of {', '.join(part.source for part in self._parts)} differ in their "
                    f"values: some have {kinds[0] or 'none'}, some {kind or 'none'}; give all rows "
                    "the same columns"
                )
        return kinds[0] if kinds else {}


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
