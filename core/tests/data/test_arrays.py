"""Inputs of examples as bytes of a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.data import arrays
from rlhf.data.example import Answer, Example
from rlhf.data.trees import TreeFile, to_table, tree, write

DRAW = np.random.default_rng(0)
BYTES = DRAW.integers(0, 256, (40, 3, 32, 32))
MEANS = np.array([0.48, 0.45, 0.4], np.float32).reshape(3, 1, 1)
CHANNELS = ((BYTES / 255).astype(np.float32) - MEANS) / (MEANS / 2)
PIXELS: dict[str, tuple[Any, bool]] = {
    "of channels": (CHANNELS, True),
    "of three crops": (CHANNELS[:39].reshape(13, 3, 3, 32, 32), True),
    "of patches": (CHANNELS.reshape(40, -1), True),
    "of one kind": ((BYTES[:, :2] / 127.5 - 1).astype(np.float32), True),
    "with a sign and no number": (np.where(CHANNELS > 2, -0.0, np.nan).astype(np.float32), True),
    "of a mask": (BYTES % 2, True),
    "of any value": (DRAW.normal(size=BYTES.shape).astype(np.float32), False),
    "of any value later": (
        np.concatenate([CHANNELS, DRAW.normal(size=CHANNELS.shape).astype(np.float32)]),
        False,
    ),
    "of few": (CHANNELS[:2], False),
    "of half": (CHANNELS.astype(np.float16), False),
}


@pytest.mark.parametrize("kind", PIXELS)
def test_inputs_are_read_as_they_were_and_pixels_take_a_byte(kind: str, tmp_path: Path) -> None:
    array, coded = PIXELS[kind]
    inputs = {"a": np.arange(5.0), "pixels": array, "sizes": np.array([[1, 2, 3]])}
    row = tree(Example([1], [Answer([2])], inputs=inputs))
    write(to_table([row]), tmp_path / "rows.arrow")
    file = TreeFile(tmp_path / "rows.arrow")
    found = file[0].inputs
    assert found["pixels"].dtype == array.dtype
    assert found["pixels"].shape == array.shape
    assert found["pixels"].tobytes() == array.tobytes()
    assert found["sizes"].tolist() == [[1, 2, 3]]
    assert found["a"].tolist() == [0, 1, 2, 3, 4]
    others = 5 * 4 + 3 * 8  # `as_array` makes `a` float32.
    assert file.input_bytes.tolist() == [array.nbytes + others]
    kept = len(row["inputs"]) - others
    palettes = {array.size + channels * 256 * array.itemsize for channels in (1, 3)}
    assert kept in (palettes if coded else {array.nbytes})


def test_inputs_are_read_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(arrays, "_decoded", lambda *args: read.append(args) or np.zeros(3))
    example = Example([1], [Answer([2])], inputs={"pixels": CHANNELS})
    write(to_table([tree(example)]), tmp_path / "rows.arrow")
    inputs = TreeFile(tmp_path / "rows.arrow")[0].inputs
    assert [*inputs] == ["pixels"]
    assert not read
    assert inputs["pixels"] is inputs["pixels"]
    assert len(read) == 1
