"""CSV: all cells are text, columns without a name are left out, and errors name the line."""

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest
from numbered_words import examples_of, ids

from rlhf.config.sections import DataEntry
from rlhf.data.files import Source
from rlhf.errors import RLHFError

pytestmark = pytest.mark.usefixtures("cache")


def rows_of(path: Path) -> list[Any]:
    """Return the rows of a CSV file, which `path.with_suffix("")` takes."""
    scratch = path.with_suffix("")
    scratch.mkdir()
    source = Source(DataEntry(path=str(path)), "train", "demonstration")
    return [source.row(row, 0)[1] for row in source.read(scratch)]


def test_cells_of_csv_are_text_except_labels_and_margins(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        "prompt,completion,label,margin\n1,None,True,0.5\n2,NA,0,\nq,007,false,2\n,nan,maybe,1e3\n"
    )
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for place in (path, packed):
        assert rows_of(place) == [
            {"prompt": "1", "completion": "None", "label": True, "margin": 0.5},
            {"prompt": "2", "completion": "NA", "label": 0},
            {"prompt": "q", "completion": "007", "label": False, "margin": 2},
            {"prompt": "", "completion": "nan", "label": "maybe", "margin": 1000.0},
        ]


CELLS = [
    pytest.param("a" * 200_000, f"{'a' * 200_000}", id="long"),
    pytest.param('two\r\nlines, and "quotes"', '"two\r\nlines, and ""quotes"""', id="quotes"),
    pytest.param('5" disk', '5" disk', id="a quote within"),
    pytest.param("C:\\new\\n", "C:\\new\\n", id="backslashes"),
    pytest.param("2025-05-01", "2025-05-01", id="date"),
    pytest.param(" a ", " a ", id="blanks"),
    pytest.param("\u2028\x85\x00", "\u2028\x85\x00", id="characters that end lines elsewhere"),
]


@pytest.mark.parametrize(("value", "cell"), CELLS)
@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_cell_of_csv_is_read_as_it_is(
    value: str, cell: str, begin: str, newline: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    lines = ["prompt,completion", f"q,{cell}", "", " ", "short"]
    path.write_text(begin + newline.join(lines), encoding="utf-8", newline="")
    assert rows_of(path) == [
        {"prompt": "q", "completion": value},
        {"prompt": "short", "completion": ""},
    ]
    assert csv.field_size_limit() == 131_072  # The default of the module, for others.


NAMES = [
    (",prompt,completion", "{number},w{number},w1"),
    ("prompt,completion,", "w{number},w1,"),
    (",,prompt, ,completion,,", "{number},x,w{number},y,w1,,z"),
    ("Unnamed: 0.1,Unnamed: 0,prompt,completion", "{number},{number},w{number},w1"),
]


@pytest.mark.parametrize(("header", "row"), NAMES)
def test_a_column_of_csv_without_a_name_is_ignored(header: str, row: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [row.format(number=number) for number in range(3)]
    path.write_text("\n".join([header, *lines]) + "\n")
    assert ids(examples_of(str(path))) == [([n + 2], [3, 1]) for n in range(3)]
    if not header.startswith("Unnamed"):
        assert all(set(row) == {"prompt", "completion"} for row in rows_of(path))


BAD = [
    ("a,b,a\n1,2,3\n", "2 columns are called 'a'; rename them"),
    (",\n1,2\n", "no column has a name; write the names in the first line"),
    (
        "prompt,completion\n\nHello, you,Hi\n",
        "line 3 has 3 cells for 2 columns; put quotes around cells with commas",
    ),
    (
        "prompt,completion\nHello,Hi,\n",
        "line 2 has 3 cells for 2 columns; put quotes around cells with commas",
    ),
    (
        'prompt,completion\n"a\nb",c\nd,e,f\n',
        "line 4 has 3 cells for 2 columns; put quotes around cells with commas",
    ),
    ('prompt,completion\na,b\nc,"d\ne,f\n', "line 3 has a quote that is not closed"),
]


@pytest.mark.parametrize(("text", "problem"), BAD)
def test_a_csv_file_that_is_not_a_table_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(RLHFError) as error:
        rows_of(path)
    assert str(error.value) == f"data.train: cannot read {path}: {problem}"


def test_a_csv_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("prompt,completion\nq,caf\u00e9\n".encode("cp1252"))
    with pytest.raises(RLHFError) as error:
        rows_of(path)
    assert str(error.value) == (
        f"data.train: cannot read {path}: not UTF-8: 'utf-8' codec can't decode byte 0xe9 in "
        "position 23: invalid continuation byte"
    )


@pytest.mark.parametrize("content", [b"", b"prompt,completion\n", b"prompt", b"\n \n"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_a_csv_file_without_rows_has_none(content: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") and content else content)
    with pytest.raises(RLHFError) as error:
        examples_of(str(path))
    assert str(error.value) == f"data.train: no rows in {path}"
