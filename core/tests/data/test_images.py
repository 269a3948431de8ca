"""What core does with rows that have images: it asks a plugin, and keeps inputs as arrays."""

from pathlib import Path

import numpy as np
import pytest
from numbered_words import examples_of, write_lines

from rlhf.data.example import Answer, Example
from rlhf.data.trees import KEPT, TreeFile, open_files, to_table, tree, write
from rlhf.errors import RLHFError
from rlhf.registry.installed import NotInstalled

PIXELS = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
INPUTS = {
    "pixel_values": PIXELS,
    "grid": [[1, 2]],
    "token_type_ids": [0, 1, 0, 0, 0],
    "position_ids": np.zeros((5, 3), np.int64),
}
WITH = Example([1, 2], [Answer([3]), Answer([4, 5])], inputs=INPUTS)
WITHOUT = Example([6], [Answer([7]), Answer([8, 9])])


def written(folder: Path, *examples: Example) -> Path:
    folder.mkdir(exist_ok=True)
    write(to_table([tree(each, status=KEPT) for each in examples]), folder / "rows.arrow")
    return folder / "rows.arrow"


def test_inputs_are_read_back_with_their_types(tmp_path: Path) -> None:
    file = TreeFile(written(tmp_path, WITHOUT, WITH))
    inputs, again = file[1].inputs, file[1].inputs
    assert list(inputs) == list(INPUTS)
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, INPUTS[name])
        # They are those of the file, without a copy.
        assert array.ctypes.data == again[name].ctypes.data
        assert not array.flags.writeable
    assert [str(array.dtype) for array in inputs.values()] == ["float32", *["int64"] * 3]


def test_numbers_of_64_bits_with_a_fraction_become_float32(tmp_path: Path) -> None:
    example = Example([1], [Answer([2])], inputs={"a": [0.1], "b": np.array([0.1])})
    inputs = TreeFile(written(tmp_path, example))[0].inputs
    assert [str(array.dtype) for array in inputs.values()] == ["float32"] * 2


def test_an_example_without_inputs_gets_those_of_text(tmp_path: Path) -> None:
    paths = [written(tmp_path / "text", WITHOUT), written(tmp_path / "both", WITHOUT, WITH)]
    for example in (TreeFile(paths[1])[0], open_files(paths)[0][0]):
        inputs = example.inputs
        assert inputs["pixel_values"].shape == (0, 2, 3)
        assert inputs["grid"].shape == (0, 2)
        assert inputs["token_type_ids"].tolist() == [0] * 4
        assert inputs["position_ids"].tolist() == [[n] * 3 for n in (0, 1, 1, 2)]
    assert TreeFile(paths[0])[0].inputs == {}


def test_large_rows_are_written_in_small_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.data.trees.CHUNK_BYTES", 1000)
    file = TreeFile(written(tmp_path, *[WITH] * 8))
    assert len(file._chunks) > 1
    assert all(each.inputs["grid"].tolist() == [[1, 2]] for each in map(file.__getitem__, range(8)))


def test_a_chunk_ends_before_its_images_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.data.trees.CHUNK_BYTES", 400)
    file = TreeFile(written(tmp_path, *[WITHOUT] * 20, *[WITH] * 4))
    assert [batch.num_rows for batch in file._batches] == [22, 2]
    assert (file.input_bytes > 0).tolist() == [False] * 20 + [True] * 4


def test_without_the_plugin_a_row_with_images_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(kind: str, name: str) -> None:
        raise NotInstalled(f"{kind} '{name}' is not installed")

    monkeypatch.setattr("rlhf.data.images.find", find)
    path = write_lines(tmp_path / "rows.jsonl", [{"text": "w1"}, {"text": "w1", "image": "a.png"}])
    with pytest.raises(RLHFError) as error:
        examples_of(path)
    assert str(error.value) == (
        f"{path} line 2: the row has images, which core does not read; run "
        "`pip install rlhf-vision`"
    )
    assert len(examples_of(write_lines(tmp_path / "text.jsonl", [{"text": "w1"}])))
