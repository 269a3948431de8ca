"""What docs/families.md says of every causal type of transformers, and that none ends in a
traceback."""

import every_type
import pytest
import transformers

PAGE = every_type.PAGE.read_text(encoding="utf-8").splitlines()
SAME_VERSION = f"transformers {transformers.__version__}," in PAGE[2]


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", every_type.TYPES)
def test_the_page_says_what_a_run_does(model_type: str) -> None:
    with every_type.quiet():
        row = every_type.row_of(model_type)
    assert not SAME_VERSION or row_without_error(row) in map(row_without_error, PAGE)


def row_without_error(row: str) -> list[str]:
    cells = row.split(" | ")
    return [*cells[:2], *cells[3:]]
