"""Examples as Arrow columns: flat token ids with offsets, so that reading copies nothing."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlhf.data.example import Answer, Example, longest_path, num_tokens
from rlhf.data.packing import PER_ANSWER, PER_EXAMPLE, PER_TOKEN, kind_of

KEPT, CUT, TOO_LONG, EMPTY = range(4)
NUMBERS = (
    "row",
    "status",
    "length",
    "path",
    "answers",
    "predictions",
    "labels",
    "labels_cut",
)
LISTS = {
    "prompt": pa.int32(),
    "tokens": pa.int32(),
    "ends": pa.int32(),
    "trained": pa.uint8(),
    "values": pa.float32(),
}
NUMPY = {
    pa.int64(): np.int64, pa.int32(): np.int32, pa.uint8(): np.uint8, pa.float32(): np.float32,
}  # fmt: skip
TOKENS = ("prompt", "tokens", "ends", "trained")
"""The lists that decide what a model sees and predicts."""
SCHEMA = pa.schema(
    [(name, pa.int64()) for name in NUMBERS]
    + [(name, pa.large_list(kind)) for name, kind in LISTS.items()]
    + [(name, pa.string()) for name in ("place", "kinds", "inputs", "columns")]
)
"""Offsets have 64 bits: the lists of a chunk are joined, which long rows make longer than 2**31."""
CHUNK_ROWS = 8192
NOTHING = Example([], [])
NO_IDS = np.empty(0, np.int32)


def tree(example: Example = NOTHING, **counts: int) -> dict[str, Any]:
    """Return a row of the table: an example, and those of `NUMBERS` that do not follow from it. The
    end of its row's name, `place`, is left empty."""
    answers, values = example.answers, example.values
    sizes = [len(answer.tokens) for answer in answers]
    names = sorted(values, key=lambda name: (kind_of(values[name]) != PER_EXAMPLE, name))
    return dict.fromkeys(NUMBERS, 0) | {
        **counts,
        "length": num_tokens(example),
        "path": longest_path(example),
        "answers": len(sizes),
        "prompt": np.asarray(example.prompt, np.int32),
        "tokens": np.concatenate([NO_IDS, *(np.asarray(a.tokens, np.int32) for a in answers)]),
        "ends": [*accumulate(sizes)],
        "trained": np.array(_masks(answers), np.uint8),
        "values": [x for name in names for x in _flat(values[name])],
        "place": "",
        "kinds": json.dumps({name: kind_of(values[name]) for name in names}) if names else "",
        "inputs": json.dumps(dict(example.inputs), default=_listed) if example.inputs else "",
        "columns": json.dumps(dict(example.columns)) if example.columns else "",
    }


def to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the table of these rows."""
    columns = [pa.array([row[column.name] for row in rows], column.type) for column in SCHEMA]
    return pa.table(columns, schema=SCHEMA)


class TreeFile:
    """The examples of one file of `write`, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        batches = self._table.to_batches()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
        self._chunks = [
            {name: (numbers(batch[name].offsets), numbers(batch[name].values)) for name in LISTS}
            for batch in batches
        ]
        self._texts = [
            name
            for name in ("inputs", "columns")
            # A file of an earlier version may lack it.
            if name in self._table.column_names and any(self._table[name].unique().to_pylist())
        ]
        """Those columns of JSON that any example has."""
        kinds = self._table["kinds"].unique().to_pylist()
        self.kinds: list[dict[str, str]] = [json.loads(text) if text else {} for text in kinds]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Example:
        place = bisect_right(self._starts, number) - 1
        chunk, index = self._chunks[place], number - self._starts[place]

        def part(name: str) -> Any:
            offsets, values = chunk[name]
            return values[offsets[index] : offsets[index + 1]]

        tokens, trained = part("tokens"), part("trained")
        answers, start = [], 0
        for end in part("ends").tolist():
            mask = trained[start:end].view(np.bool_) if len(trained) else None
            answers.append(Answer(tokens[start:end], mask))
            start = end
        values = _nested(part("values"), self.kinds[0], answers) if self.kinds[0] else {}
        texts = {name: self._table[name][number].as_py() or "{}" for name in self._texts}
        more = {name: json.loads(text) for name, text in texts.items()}
        return Example(part("prompt"), answers, values, **more)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each tree [n]."""
        return self.column("length")

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Tokens of each example's prompt [n]."""
        return self.list_lengths("prompt")

    def column(self, name: str) -> NDArray[np.int64]:
        """Return a column of numbers [n]."""
        return numbers(self._table[name].combine_chunks())

    def place(self, number: int) -> str:
        """Return the end of the name of an example's row, such as ` line 3`."""
        return str(self._table["place"][number].as_py())

    def digest(self) -> str:
        """Return a digest of all token ids, of which are trained on, and of inputs; values do not
        count."""
        digest = hashlib.blake2b(digest_size=16)
        for chunk in self._chunks:
            for name in TOKENS:
                offsets, values = chunk[name]
                # The digest does not depend on how wide the offsets are.
                digest.update(np.diff(offsets).astype(np.int32).tobytes())
                digest.update(values[offsets[0] : offsets[-1]].tobytes())
        for text in self._json(["inputs"]):
            digest.update(text)
        return digest.hexdigest()

    @property
    def content(self) -> str:
        """A digest of all that training reads of the examples, which `write` has computed."""
        return _beside(self.path).read_text(encoding="utf-8")

    def compute_content(self) -> str:
        """Return a digest of tokens, which are trained on, values, inputs, columns and which are of
        one row, in the order of the examples. It does not depend on the chunks."""
        digest = hashlib.sha256(json.dumps(self.kinds).encode())
        digest.update((np.diff(self.column("row")) != 0).data)
        for name in LISTS:
            digest.update(self.list_lengths(name).data)
            for chunk in self._chunks:
                offsets, values = chunk[name]
                digest.update(values[offsets[0] : offsets[-1]].data)
        for text in self._json(self._texts):
            digest.update(text)
        return digest.hexdigest()

    def largest_token(self) -> int:
        """Return the largest token id, 0 without tokens."""
        largest = [pc.max(pc.list_flatten(self._table[name])) for name in ("prompt", "tokens")]
        return max(token.as_py() or 0 for token in largest)

    def list_lengths(self, name: str) -> NDArray[np.int64]:
        """Return how many entries a column of lists has in each example [n]."""
        return numbers(pc.list_value_length(self._table[name]).combine_chunks()).astype(np.int64)

    def value(self, name: str) -> NDArray[np.float32]:
        """Return a value per example [n]."""
        kinds = self.kinds[0]
        assert kinds.get(name) == PER_EXAMPLE, f"no value {name!r} per example: {kinds}"
        # They are the first of an example's values.
        place = list(kinds).index(name)
        columns = (chunk["values"] for chunk in self._chunks)
        return np.concatenate([values[offsets[:-1] + place] for offsets, values in columns])

    def _json(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the text in columns of JSON of each example with its length, without those that no
        example has."""
        for name in (name for name in names if name in self._texts):
            for text in self._table[name].to_pylist():
                yield f"{len(text)} {text}".encode()


def write(table: pa.Table, path: Path) -> None:
    """Write the kept rows of the table as a file of chunks that `TreeFile` maps, and the digest of
    their content."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        for start in range(0, table.num_rows, CHUNK_ROWS):
            part = table.slice(start, CHUNK_ROWS)
            kept = part.filter(pa.array(part["status"].to_numpy() <= CUT)).combine_chunks()
            if kept.num_rows:
                writer.write_table(kept)
    _beside(path).write_text(TreeFile(path).compute_content(), encoding="utf-8")


def _beside(path: Path) -> Path:
    """Return the file with the digest of a file's content."""
    return path.with_suffix(".sha256")


def _masks(answers: Sequence[Answer]) -> Sequence[bool]:
    """Return the masks of all answers; empty if everything is trained on."""
    if all(answer.trained is None for answer in answers):
        return []
    masks = ([True] * len(a.tokens) if a.trained is None else a.trained for a in answers)
    return [*chain.from_iterable(masks)]


def _flat(value: Any) -> list[float]:
    if not hasattr(value, "__len__"):
        return [float(value)]
    return [float(x) for item in value for x in (item if hasattr(item, "__len__") else [item])]


def _listed(value: Any) -> Any:
    """Return a tensor or an array as nested lists."""
    return value.tolist()


def _nested(
    flat: NDArray[np.float32], kinds: Mapping[str, str], answers: Sequence[Answer]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    ends = [*accumulate(len(answer.tokens) for answer in answers)]
    counts = {PER_EXAMPLE: 1, PER_ANSWER: len(answers), PER_TOKEN: ends[-1] if ends else 0}
    for name, kind in kinds.items():
        part, flat = flat[: counts[kind]], flat[counts[kind] :]
        if kind == PER_EXAMPLE:
            values[name] = float(part[0])
        else:
            values[name] = part if kind == PER_ANSWER else np.split(part, ends[:-1])
    return values


def numbers(array: pa.Array) -> NDArray[Any]:
    """Return an Arrow array of numbers, none of them missing, without a copy. Arrow's `to_numpy`,
    and in some versions `to_pandas_dtype`, imports pandas where it is installed."""
    dtype = np.dtype(NUMPY[array.type])
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
