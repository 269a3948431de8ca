"""Values per token on disk, such as the reference's log-probabilities, checked when read.

One folder per (weights, tokens): `reference/WEIGHTS/TOKENS/` under the cache root, in parts of some
thousand examples. A part's name holds the digest of its bytes, so a killed run keeps its complete
parts, and a damaged file is computed again. Plain arrays, no pickles.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlhf.data.trees import TreeFile
from rlhf.folder.disk import writing
from rlhf.reference.surveyed import SurveyedExamples

Trees = TreeFile | SurveyedExamples

PART = 2048
"""Examples per file: as many as a killed run can lose."""


class LogprobTable:
    """Log-probabilities of each answer in one file of tokenised rows, or in the examples of a
    survey, per token; nan where nothing is predicted. An item is a list of float32 arrays [tokens]
    or [tokens, width], one per answer."""

    def __init__(self, folder: Path, file: Trees, *, width: int | None = None) -> None:
        self.folder = folder / file.digest()
        self.part = max(1, PART // (width or 1))
        """Examples per file."""
        self._shape = () if width is None else (width,)
        self.file = file
        sizes = file.lengths - file.prompt_lengths
        self._starts = np.concatenate(([0], sizes)).cumsum()
        self._parts: dict[int, NDArray[np.float32]] = {}

    def __getitem__(self, number: int) -> list[NDArray[np.float32]]:
        part = number // self.part
        start, end = self._starts[number : number + 2] - self._starts[part * self.part]
        flat = self._parts[part][start:end]
        ends = np.cumsum([len(answer.tokens) for answer in self.file[number].answers])
        return np.split(flat, ends[:-1])

    def open(self) -> list[int]:
        """Map the complete parts and return the numbers of others. Damaged files are deleted."""
        missing = []
        for part in range(-(-len(self.file) // self.part)):
            if part in self._parts:
                continue
            arrays = (_read(path) for path in sorted(self.folder.glob(f"{part:06d}-*.npy")))
            numbers = self.examples_of(part)
            shape = (self._starts[numbers.stop] - self._starts[numbers.start], *self._shape)
            whole = [array for array in arrays if array is not None and array.shape == shape]
            if whole:
                self._parts[part] = whole[0]
            else:
                missing.append(part)
        return missing

    def write(self, part: int, values: NDArray[np.float32]) -> None:
        """Write a part, completely or not at all. Several hosts that share the folder may write
        the same one at a time, each under a name of its own."""
        hidden = self.folder / f".{part:06d}.{os.getpid()}.npy"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                np.save(hidden, values, allow_pickle=False)
                hidden.replace(self.folder / f"{part:06d}-{_digest(values)}.npy")
            finally:
                hidden.unlink(missing_ok=True)

    def examples_of(self, part: int) -> range:
        """Return the numbers of the examples in a part."""
        return range(part * self.part, min((part + 1) * self.part, len(self.file)))


def _read(path: Path) -> NDArray[np.float32] | None:
    """Return the array in a part, mapped into memory; delete a damaged file and return None."""
    with suppress(ValueError, EOFError, OSError):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype == np.float32 and path.stem.endswith(_digest(array)):
            return array
    path.unlink(missing_ok=True)
    return None


def _digest(values: NDArray[np.float32]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).hexdigest()
