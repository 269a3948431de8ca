"""Every kind of file gives the same rows, and errors name the file and the line."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from numbered_words import (
    EXPECTED,
    ROWS,
    Raw,
    examples_of,
    ids,
    write_lines,
)

from rlhf.config.sections import DataEntry
from rlhf.data.example import Example
from rlhf.data.files import Source
from rlhf.errors import RLHFError

pytestmark = pytest.mark.usefixtures("cache")


def test_every_kind_of_file_gives_the_same_examples(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    write_lines(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    rows.to_csv(tmp_path / "rows.csv")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    rows.to_parquet(tmp_path / "plain" / "rows.parquet")
    arrow = next((tmp_path / "folder").glob("*.arrow"))
    names = [
        "rows.json",
        "rows.jsonl",
        "rows.jsonl.gz",
        "rows.csv",
        "rows.parquet",
        "folder",
        "splits",
        "plain",
    ]
    for path in [*(tmp_path / name for name in names), arrow]:
        examples = examples_of(str(path))
        assert ids(examples) == EXPECTED, path
        assert examples.lengths.tolist() == [4] * 10
        assert examples.counts["tokens"].tolist() == [3] * 10


def test_the_demo_gives_rows_of_the_trainers_format() -> None:
    examples = examples_of(DataEntry(path="demo:equations", limit=7), data={"max_tokens": 4096})
    assert len(examples) == 7
    assert examples.name(3) == "demo:equations row 3"


def test_an_array_may_begin_after_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf\n \r\n" + b'[{"prompt": "a", "completion": "b"}]')
    (example,) = examples_of(str(path))
    assert len(example.answers) == 1


def test_nested_mappings_keep_their_own_keys(tmp_path: Path) -> None:
    rows = [{"number": n, "tools": [{"properties": {f"key{n}": {"type": "x"}}}]} for n in range(2)]
    seen = []

    class Looking(Raw):
        def example(self, row: Any) -> Example:
            seen.append(row["tools"])
            return super().example(row)

    examples_of(write_lines(tmp_path / "rows.jsonl", rows), trainer=Looking)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    examples_of(str(tmp_path / "rows.parquet"), trainer=Looking)
    assert seen == [row["tools"] for row in rows] * 2


def test_columns_are_renamed_and_limits_are_kept(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "answer": row["completion"]} for row in ROWS]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    names = {"prompt": "question", "completion": "answer"}
    assert ids(examples_of(DataEntry(path=path, columns=names, limit=4))) == EXPECTED[:4]
    with pytest.raises(RLHFError) as caught:
        examples_of(DataEntry(path=path, columns={"prompt": "query"}))
    assert str(caught.value) == (
        f"{path} line 1: data.train maps `prompt` to column `query`, which does not exist; "
        "columns: question, answer"
    )


def test_a_renamed_column_may_be_null(tmp_path: Path) -> None:
    rows = [{"q": "w1", "a": "w2", "s": None}, {"q": "w1", "a": "w2", "s": "w3"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    names = {"prompt": "q", "completion": "a", "system": "s"}
    entry = DataEntry(path=str(tmp_path / "rows.parquet"), columns=names)
    source = Source(entry, "train", "demonstration")
    table = source.read(tmp_path)
    found = [source.row(table[number], number)[1] for number in range(2)]
    expected = {"prompt": "w1", "completion": "w2"}
    assert found == [expected, expected | {"system": "w3"}]


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "folder"])
def test_new_bytes_are_read_although_the_time_of_the_file_is_that_of_the_old(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    file = path / "rows.csv" if name == "folder" else path
    file.parent.mkdir(exist_ok=True)
    for word in ("w1", "w2"):
        rows = datasets.Dataset.from_list([{"text": word}])
        (rows.to_parquet if name == "rows.parquet" else rows.to_csv)(file)
        os.utime(file, (10**9, 10**9))
        scratch = tmp_path / word
        scratch.mkdir()
        source = Source(DataEntry(path=str(path)), "train", "demonstration")
        assert source.row(source.read(scratch)[0], 0)[1] == {"text": word}


BAD_FILES = [
    (
        "rows.jsonl",
        b'{"text": "w1"}\n{"text" "w2"}\n',
        "{} line 2: not valid JSON: Expecting ':' delimiter: line 1 column 9 (char 8)",
    ),
    (
        "rows.jsonl",
        b'["w1", "w2"]\n3\n',
        "{}: not valid JSON: Extra data: line 2 column 1 (char 13)",
    ),
    ("rows.jsonl", b'{"text": "w1"}\n17\n', "{} line 2: a row must be a JSON object, not 17"),
    (
        "rows.jsonl",
        b'{"text": "w1"}\n\xff\xfe\n',
        "{} line 2: not UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte",
    ),
    ("rows.jsonl.gz", b"no gzip", "{} line 1: cannot be read: Not a gzipped file (b'no')"),
    (
        "rows.jsonl.gz",
        gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20,
        "{} line 1: cannot be read: Error -3 while decompressing data: invalid block type",
    ),
    (
        "rows.txt",
        b"w1\n",
        "data.train: unknown file type {}; use one of "
        ".jsonl, .jsonl.gz, .json, .json.gz, .ndjson, .csv, .csv.gz, .parquet, .arrow",
    ),
    ("rows.jsonl", b"", "data.train: no rows in {}"),
    ("rows.parquet", b"", "data.train: no rows in {}"),
    ("rows.arrow", b"", "data.train: no rows in {}"),
    ("rows.arrow", b"these are no tables", "data.train: cannot read {}: Not an Arrow file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RLHFError) as caught:
        examples_of(str(path))
    assert str(caught.value) == message.format(path)


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, in_folder: bool) -> None:
    # Reading the memory of a process at address 0 fails, for root too.
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(RLHFError) as caught:
        examples_of(str(tmp_path if in_folder else path))
    assert str(caught.value) == f"data.train: cannot read {path}: Input/output error"


def test_a_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "ROWS.JSONL.GZ").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "ROWS.CSV.GZ").write_bytes(gzip.compress(b"text\nw1\n"))
    assert len(examples_of(str(tmp_path / "ROWS.JSONL.GZ"))) == len(ROWS)
    assert len(examples_of(str(tmp_path / "ROWS.CSV.GZ"))) == 1


def test_a_missing_file_or_split_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.jsonl"
    with pytest.raises(RLHFError) as caught:
        examples_of(str(path))
    assert str(caught.value) == f"data.train: no such file or folder: {path}"
    rows = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    rows.save_to_disk(tmp_path / "splits")
    with pytest.raises(RLHFError) as caught:
        examples_of(DataEntry(path=str(tmp_path / "splits"), split="dev"))
    assert (
        str(caught.value) == f"data.train: {tmp_path}/splits has no split 'dev'; available: train"
    )
