"""Examples as Arrow columns: flat token ids with offsets, so that reading copies nothing."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlhf.data.arrays import Arrays, blank_arrays, numbers, to_bytes
from rlhf.data.example import Answer, Example, longest_path, num_tokens
from rlhf.data.packing import PER_ANSWER, PER_EXAMPLE, PER_TOKEN, as_array, kind_of

KEPT, CUT, TOO_LONG, EMPTY, BAD_IMAGES = range(5)
NUMBERS = (
    "row", "status", "length", "path", "answers", "predictions", "labels", "labels_cut", "bytes",
)  # fmt: skip
LISTS = {
    "prompt": pa.int32(),
    "tokens": pa.int32(),
    "ends": pa.int32(),
    "trained": pa.uint8(),
    "values": pa.float32(),
}
TEXTS = ("place", "files", "images", "thumbnails")
"""The end of a row's name, and of its images the digests of files, lines and small pictures."""
TOKENS = ("prompt", "tokens", "ends", "trained")
"""The lists that decide what a model sees and predicts."""
SCHEMA = pa.schema(
    [(name, pa.int64()) for name in NUMBERS]
    + [(name, pa.large_list(kind)) for name, kind in LISTS.items()]
    + [(name, pa.string()) for name in ("kinds", "columns", "arrays", *TEXTS)]
    + [("inputs", pa.large_binary())]
)
"""Offsets have 64 bits: the lists of a chunk are joined, which long rows make longer than 2**31."""
CHUNK_ROWS = 8192
CHUNK_BYTES = 2**28
"""A chunk is smaller if its rows are large, as those with images are: it is made in memory."""
NOTHING = Example([], [])
NO_IDS = np.empty(0, np.int32)


def tree(example: Example = NOTHING, **counts: int) -> dict[str, Any]:
    """Return a row of the table: an example, and those of `NUMBERS` that do not follow from it.
    `TEXTS` are left empty."""
    answers, values = example.answers, example.values
    arrays = {name: as_array(value) for name, value in example.inputs.items()}
    coded = {name: to_bytes(array) for name, array in arrays.items()}
    shapes = [[n, str(a.dtype), a.shape, coded[n][0]] for n, a in arrays.items()]
    sizes = [len(answer.tokens) for answer in answers]
    names = sorted(values, key=lambda name: (kind_of(values[name]) != PER_EXAMPLE, name))
    return dict.fromkeys(NUMBERS, 0) | {
        **dict.fromkeys(TEXTS, ""),
        **counts,
        "length": num_tokens(example),
        "path": longest_path(example),
        "answers": len(sizes),
        "bytes": sum(array.nbytes for array in arrays.values()),
        "prompt": np.asarray(example.prompt, np.int32),
        "tokens": np.concatenate([NO_IDS, *(np.asarray(a.tokens, np.int32) for a in answers)]),
        "ends": [*accumulate(sizes)],
        "trained": np.array(_masks(answers), np.uint8),
        "values": [x for name in names for x in _flat(values[name])],
        "kinds": json.dumps({name: kind_of(values[name]) for name in names}) if names else "",
        "columns": json.dumps(dict(example.columns)) if example.columns else "",
        "arrays": json.dumps(shapes) if shapes else "",
        "inputs": b"".join(data for _, data in coded.values()),
    }


def to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the table of these rows."""
    columns = [pa.array([row[column.name] for row in rows], column.type) for column in SCHEMA]
    return pa.table(columns, schema=SCHEMA)


class TreeFile:
    """The examples of one file of `write`, mapped into memory."""

    def __init__(self, path: Path) -> None:
        digest = _beside(path)
        self.content = digest.read_text(encoding="utf-8") if digest.exists() else ""
        """A digest of all that training reads of the examples, which `write` has computed."""
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._batches = self._table.to_batches()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)]).tolist()
        self._chunks = [
            {name: (numbers(batch[name].offsets), numbers(batch[name].values)) for name in LISTS}
            for batch in self._batches
        ]
        self._has_columns = any(self._table["columns"].unique().to_pylist())
        # A rollout that an earlier version has saved lacks the column.
        known = "arrays" in self._table.column_names
        arrays = self._table["arrays"].unique().to_pylist() if known else []
        self.arrays: list[Any] = json.loads(next(filter(None, arrays), "[]"))
        """Name, type, shape and coding of the inputs of the first example with inputs. An example
        without gets these with 0 rows, and those that describe tokens as of text."""
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
        columns = self._table["columns"][number].as_py() if self._has_columns else ""
        example = Example(part("prompt"), answers, values, columns=json.loads(columns or "{}"))
        if not self.arrays:
            return example
        batch = self._batches[place]
        kept = json.loads(batch["arrays"][index].as_py() or "[]")
        inputs: Mapping[str, Any] = Arrays(kept, _bytes_at(batch["inputs"], index))
        return attrs.evolve(example, inputs=inputs or blank_arrays(self.arrays, example))

    @property
    def input_bytes(self) -> NDArray[np.int64]:
        """Bytes of each example's own inputs [n], 0 without any."""
        return self.column("bytes")

    def with_token(self, token: int) -> NDArray[np.bool_]:
        """Return whether each example has a token [n]."""
        found = np.zeros(len(self), np.bool_)
        for start, chunk in zip(self._starts, self._chunks, strict=False):
            for offsets, values in (chunk["prompt"], chunk["tokens"]):
                at = np.flatnonzero(values == token)
                found[start + np.searchsorted(offsets, at, side="right") - 1] = True
        return found

    def has_input(self, name: str) -> bool:
        """Return whether any example has an input with this name."""
        return bool(pc.any(pc.match_substring(self._table["arrays"], f'"{name}"')).as_py())

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

    def text(self, name: str, number: int) -> str:
        """Return one of `TEXTS` of an example's row."""
        return str(self._table[name][number].as_py())

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
        self._update_with_arrays(digest)
        return digest.hexdigest()

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
        for text in self._table["columns"].to_pylist() if self._has_columns else ():
            digest.update(f"{len(text)} {text}".encode())
        self._update_with_arrays(digest)
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

    def _update_with_arrays(self, digest: Any) -> None:
        """Add to a digest the inputs of each example, if any example has inputs."""
        for batch in self._batches if self.arrays else ():
            for index, shapes in enumerate(batch["arrays"].to_pylist()):
                digest.update(f"{len(shapes)} {shapes}".encode())
                digest.update(_bytes_at(batch["inputs"], index))


def open_files(paths: Sequence[Path]) -> tuple[TreeFile, ...]:
    """Return the files of the examples of a run, which have the same inputs: those of the first
    file with inputs."""
    files = tuple(map(TreeFile, paths))
    arrays = next((file.arrays for file in files if file.arrays), [])
    for file in files:
        file.arrays = file.arrays or arrays
    return files


def write(table: pa.Table, path: Path) -> None:
    """Write the kept rows of the table as a file of chunks that `TreeFile` maps, and the digest of
    their content."""
    sizes = numbers(pc.binary_length(table["inputs"]).combine_chunks())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        start = 0
        while start < table.num_rows:
            room = np.cumsum(sizes[start : start + CHUNK_ROWS]) <= CHUNK_BYTES
            part = table.slice(start, max(1, int(room.sum())))
            start += part.num_rows
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


def _bytes_at(array: pa.Array, index: int) -> pa.Buffer:
    """Return an item of an array of bytes. Arrow's scalars are copies."""
    _, offsets, data = array.buffers()
    start, end = np.frombuffer(offsets, np.int64, 2, 8 * (array.offset + index)).tolist()
    return (data or pa.py_buffer(b"")).slice(start, end - start)


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
