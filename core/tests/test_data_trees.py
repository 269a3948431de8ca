"""The file of tokenised rows."""

from pathlib import Path

import numpy as np
import pytest

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


def test_the_digest_is_that_of_earlier_files_with_narrow_offsets(file: TreeFile) -> None:
    assert file.digest() == "976cf018b50319e4c71caa99a2b8c0fc"
