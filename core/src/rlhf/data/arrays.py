"""The inputs of an example as bytes of a file, and Arrow's numbers as numpy's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlhf.data.batch import TOKEN_INPUTS
from rlhf.data.example import Example

NUMPY = {
    pa.int64(): np.int64, pa.int32(): np.int32, pa.uint8(): np.uint8, pa.float32(): np.float32,
}  # fmt: skip
CODES, LEAST_CODED = 256, 2**16
"""Values of a palette, and the bytes of an array from which it is worth one."""


def to_bytes(array: NDArray[Any]) -> tuple[bool, bytes]:
    """Return whether an array is coded, and its bytes: palettes and a byte for each value, or the
    values. Pixel values are computed of bytes, in each channel alike, so that a palette has all
    values of a channel."""
    size = array.dtype.itemsize
    if array.nbytes < LEAST_CODED or array.ndim < 2 or size not in (4, 8):
        return False, array.tobytes()
    blocks = array.reshape(_channels(array.shape))
    palettes = np.zeros((blocks.shape[1], CODES), array.dtype)
    codes = np.empty(blocks.shape, np.uint8)
    for part, palette in enumerate(palettes):
        bits = np.ravel(blocks[:, part]).view(f"i{size}")
        if len(np.unique(bits[: 4 * CODES])) > CODES:
            return False, array.tobytes()
        found = pa.array(bits).dictionary_encode()
        if len(found.dictionary) > CODES:
            return False, array.tobytes()
        palette[: len(found.dictionary)] = numbers(found.dictionary).view(array.dtype)
        codes[:, part] = numbers(found.indices).reshape(codes[:, part].shape)
    return True, palettes.tobytes() + codes.tobytes()


def _channels(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return an array's shape as [before, channels, after]: the last axis of three, else the thirds
    of the second axis, if it has thirds."""
    axis = next((axis for axis in range(len(shape) - 1, 0, -1) if shape[axis] == 3), 1)
    parts = 3 if shape[axis] % 3 == 0 else 1
    before = math.prod(shape[:axis])
    return before, parts, math.prod(shape) // (before * parts)


class Arrays(Mapping[str, Any]):
    """The inputs that `tree` has joined as `data`, read when they are asked for; those that are not
    coded without a copy: not to be written to."""

    def __init__(self, arrays: Sequence[Any], data: pa.Buffer) -> None:
        self._data = data
        self._kept: dict[str, tuple[int, str, list[int], bool]] = {}
        self._read: dict[str, NDArray[Any]] = {}
        start = 0
        for name, dtype, shape, *coded in arrays:
            self._kept[name] = start, dtype, shape, any(coded)
            size, count = np.dtype(dtype).itemsize, math.prod(shape)
            start += count + CODES * size * _channels(shape)[1] if any(coded) else count * size

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._read:
            start, dtype, shape, is_coded = self._kept[name]
            read = _decoded if is_coded else _values
            self._read[name] = read(self._data, start, dtype, shape)
        return self._read[name]


def _values(data: pa.Buffer, start: int, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    return np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)


def _decoded(data: pa.Buffer, start: int, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    blocks = _channels(shape)
    palettes = _values(data, start, dtype, (blocks[1], CODES))
    codes = _values(data, start + palettes.nbytes, "uint8", blocks)
    values = np.empty(blocks, dtype)
    for part, palette in enumerate(palettes):
        values[:, part] = palette.take(codes[:, part])
    return values.reshape(shape)


def blank_arrays(arrays: Sequence[Any], example: Example) -> dict[str, NDArray[Any]]:
    """Return inputs like these `arrays` for an example without images."""
    size = len(example.prompt)
    ends = [(0, size), *((size, size + len(answer.tokens)) for answer in example.answers)]
    positions = np.concatenate([np.arange(start, end) for start, end in ends])
    blank = {}
    for name, dtype, shape, *_ in arrays:
        rows = len(positions) if name in TOKEN_INPUTS else 0
        blank[name] = np.zeros((rows, *shape[1:]), dtype)
        if name == "position_ids":
            blank[name] += positions.astype(dtype).reshape(-1, *[1] * len(shape[1:]))
    return blank


def numbers(array: pa.Array) -> NDArray[Any]:
    """Return an Arrow array of numbers, none of them missing, without a copy. Arrow's `to_numpy`,
    and in some versions `to_pandas_dtype`, imports pandas where it is installed."""
    dtype = np.dtype(NUMPY[array.type])
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
