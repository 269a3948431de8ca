"""The file of tokenised rows."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest

from rlhf.data import trees
from rlhf.data.example import Answer, Example
from rlhf.data.trees import KEPT, LISTS, TreeFile, to_table, tree, write


@pytest.fixture
def file(tmp_path: Path) -> TreeFile:
    examples = [
        Example([1, 2], [Answer([3, 4], [True, False]), Answer([5])]),
        Example([7], [Answer([8])]),
    ]
    write(to_table([tree(each, status=KEPT) for each in examples]), tmp_path / "rows.arrow")
    return TreeFile(tmp_path / "rows.arrow")


def test_lists_of_a_chunk_may_have_more_than_2_to_the_31_entries(file: TreeFile) -> None:
    assert {file._chunks[0][name][0].dtype for name in LISTS} == {np.dtype(np.int64)}


def test_a_rollout_that_an_earlier_version_has_saved_is_read(tmp_path: Path) -> None:
    example = Example([1, 2], [Answer([3, 4], [True, False])], {"reward": [0.5]})
    table = to_table([tree(example)]).drop_columns(["arrays", "files", "images"])
    write(table, tmp_path / "rollout.arrow")
    (found,) = iter(TreeFile(tmp_path / "rollout.arrow"))
    assert [*found.prompt, *found.answers[0].tokens] == [1, 2, 3, 4]
    assert list(found.values["reward"]) == [0.5]


def test_reading_imports_no_pandas(file: TreeFile, tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("raise SystemExit('imported')\n")
    program = (
        "import sys; from pathlib import Path; from rlhf.data.trees import TreeFile; "
        "file = TreeFile(Path(sys.argv[1])); "
        "print(file.lengths, file.list_lengths('ends'), file[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "rows.arrow")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("[5 2] [2 1] Example("), done.stderr


def test_the_digest_is_that_of_earlier_files_with_narrow_offsets(file: TreeFile) -> None:
    assert file.digest() == "976cf018b50319e4c71caa99a2b8c0fc"


def test_the_digest_changes_with_inputs_and_with_the_example_that_has_them(tmp_path: Path) -> None:
    digests = set()
    for inputs in (
        [{}, {}],
        [{"pixels": [1.0]}, {}],
        [{"pixels": [2.0]}, {}],
        [{}, {"pixels": [1.0]}],
    ):
        rows = [Example([1, 2], [Answer([3])], {}, each) for each in inputs]
        write(to_table([tree(each, status=KEPT) for each in rows]), tmp_path / "rows.arrow")
        digests.add(TreeFile(tmp_path / "rows.arrow").digest())
    assert len(digests) == 4


ROWS = [
    Example([1, 2], [Answer([3, 4], [True, False]), Answer([5])], {"margin": 1.0}),
    Example([7], [Answer([8, 9], [True, False]), Answer([8])], {"margin": 2.0}),
]


def content(folder: Path, rows: Sequence[Example], numbers: Sequence[int] = (0, 1)) -> str:
    """The digest of the content of these examples, which are of the rows `numbers`."""
    made = [tree(each, status=KEPT, row=row) for each, row in zip(rows, numbers, strict=True)]
    write(to_table(made), folder / "rows.arrow")
    return TreeFile(folder / "rows.arrow").content


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[::-1],
        [attrs.evolve(ROWS[0], prompt=[1, 3]), ROWS[1]],
        [attrs.evolve(ROWS[0], answers=ROWS[0].answers[::-1]), ROWS[1]],
        [ROWS[0], attrs.evolve(ROWS[1], answers=[Answer([8, 9]), Answer([8])])],
        [attrs.evolve(ROWS[0], values={"margin": 0.0}), ROWS[1]],
        [attrs.evolve(row, values={"weight": row.values["margin"]}) for row in ROWS],
        [attrs.evolve(ROWS[0], inputs={"pixels": [1.0]}), ROWS[1]],
        [
            Example([1], [Answer([2, 3, 4], [False, True, False]), Answer([5])], ROWS[0].values),
            ROWS[1],
        ],
    ],
)
def test_the_digest_of_the_content_changes_with_all_that_training_reads(
    rows: Sequence[Example], tmp_path: Path
) -> None:
    assert content(tmp_path, rows) != content(tmp_path, ROWS)


def test_the_digest_of_the_content_does_not_change_with_the_numbers_of_rows_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = content(tmp_path, ROWS)
    assert content(tmp_path, ROWS, (3, 9)) == digest
    assert content(tmp_path, ROWS, (3, 3)) != digest
    monkeypatch.setattr(trees, "CHUNK_ROWS", 1)
    assert content(tmp_path, ROWS) == digest


def test_columns_are_kept_and_part_of_the_content_only(tmp_path: Path) -> None:
    path, digests, contents = tmp_path / "rows.arrow", set(), set()
    for columns in ({}, {"gold": "three"}, {"gold": "four", "tests": [{"in": 1}]}):
        rows = [Example([1, 2], [Answer([3])], columns=columns), Example([4], [Answer([5])])]
        table = to_table([tree(each, status=KEPT) for each in rows])
        write(table, path)
        file = TreeFile(path)
        assert [file[0].columns, file[1].columns] == [columns, {}]
        digests.add(file.digest())
        contents.add(file.content)
    assert (len(digests), len(contents)) == (1, 3)


def test_a_file_that_is_removed_after_it_was_opened_is_read_on(tmp_path: Path) -> None:
    write(to_table([tree(Example([1], [Answer([2, 3])]), status=KEPT)]), tmp_path / "rows.arrow")
    file = TreeFile(tmp_path / "rows.arrow")
    for path in (tmp_path / "rows.arrow", tmp_path / "rows.sha256"):
        path.unlink()
    assert file.content == file.compute_content()
    assert file[0].answers[0].tokens.tolist() == [2, 3]
