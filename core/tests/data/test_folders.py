"""A folder: its files are read as each is read by itself, and a split of it has the files that
`datasets` would choose."""

import gzip
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from numbered_words import ROWS, examples_of, ids

from rlhf.config.sections import DataEntry
from rlhf.data.files import Source
from rlhf.errors import RLHFError

pytestmark = pytest.mark.usefixtures("cache")

TALK = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2", "name": None}]


def fill(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write files: text as it is, and lists of rows as the suffix says."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        elif path.suffix == ".parquet":
            datasets.Dataset.from_list(content).to_parquet(path)
        else:
            lines = "".join(json.dumps(row) + "\n" for row in content).encode()
            path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return folder


def rows_of(path: Path, **options: Any) -> list[tuple[str, Any]]:
    """Return the name of each row and the row."""
    source = Source(DataEntry(path=str(path), **options), "train", "demonstration")
    with tempfile.TemporaryDirectory() as scratch:
        rows = source.read(Path(scratch))
        return [source.row(row, number) for number, row in enumerate(rows)]


def texts(path: Path, **options: Any) -> str:
    """Return the texts of the rows, which have one letter each."""
    return "".join(row["text"] for _, row in rows_of(path, **options))


def letters(letters: str) -> list[dict[str, str]]:
    return [{"text": letter} for letter in letters]


MIXED = {
    "a.jsonl": [{"messages": TALK}, {"prompt": "2025-05-01", "completion": "2025-05-01T10:00:00"}],
    "b.csv": "prompt,completion,label\n2+2?,007,\n1/0?,NA,true\nx?,None,\n2025-05-01,1e5,0\n",
    "c.parquet": [{"prompt": "w1", "completion": [{"role": "assistant", "content": "w2"}]}],
    "d.csv": "completion\nw1\n",
    "deep/er/e.json": '[{"text": 1}, {"text": ["w2"]}]',
    "deep/f.jsonl.gz": [{"tools": [{"b": {"c": 1}}]}],
    "g.jsonl": [{"messages": "text", "tools": [{"d": "e"}]}],
    "h.parquet": [{"prompt": 1.5, "completion": None}],
}


def test_the_files_of_a_folder_are_read_as_each_by_itself(tmp_path: Path) -> None:
    folder = fill(tmp_path / "mixed", MIXED)
    alone = [row for name in sorted(MIXED) for row in rows_of(folder / name)]
    assert rows_of(folder) == alone
    assert [where.removeprefix(f"{folder}/") for where, _ in alone[:8]] == [
        "a.jsonl line 1", "a.jsonl line 2", "b.csv row 0", "b.csv row 1", "b.csv row 2",
        "b.csv row 3", "c.parquet row 0", "d.csv row 0",
    ]  # fmt: skip
    assert [row.get("completion") for _, row in alone[1:6]] == [
        "2025-05-01T10:00:00", "007", "NA", "None", "1e5",
    ]  # fmt: skip


def test_examples_of_a_folder_name_the_file_and_the_line(tmp_path: Path) -> None:
    long = "prompt,completion\n" + "w2,w2 w3\n" + "w3," + "w3 " * 99 + "\n"
    folder = fill(tmp_path / "rows", {"a.jsonl": ROWS[:2], "b/c.csv": long})
    for path in (str(folder), f"{folder}/"):
        examples = examples_of(path)
        assert ids(examples) == [([n + 2], [n + 2, n + 3, 1]) for n in range(3)]
        places = ["a.jsonl line 1", "a.jsonl line 2", "b/c.csv row 0"]
        assert [examples.name(number) for number in range(3)] == [f"{folder}/{p}" for p in places]
        assert examples.report.lost == {"too_long": (f"{folder}/b/c.csv row 1",)}
        assert examples.row_numbers.tolist() == [0, 1, 2]


BAD = [
    (
        {"b.jsonl": '{"text": "w1"}\nx\n'},
        "{}/b.jsonl line 2: not valid JSON: Expecting value: line",
    ),
    ({"c/b.jsonl": '{"foo": 1}\n'}, "{}/c/b.jsonl line 1: a row needs `messages`, `text`, or"),
    ({"b.csv": "foo\n1\n"}, "{}/b.csv row 0: a row needs `messages`, `text`, or `prompt` and"),
    ({"b.parquet": "x"}, "data.train: cannot read {}/b.parquet: Parquet file size is 1 bytes"),
    ({"b.csv": "a,a\n"}, "data.train: cannot read {}/b.csv: 2 columns are called 'a'; rename them"),
]


@pytest.mark.parametrize(("files", "problem"), BAD)
def test_an_error_names_the_file_in_the_folder(
    files: dict[str, str], problem: str, tmp_path: Path
) -> None:
    fill(tmp_path, {"a.jsonl": letters("abc"), **files})
    with pytest.raises(RLHFError) as caught:
        examples_of(str(tmp_path))
    assert str(caught.value).startswith(problem.format(tmp_path))


IGNORED = {
    ".hidden.jsonl": letters("h"),
    ".git/a.jsonl": letters("h"),
    "__pycache__/a.jsonl": letters("p"),
    ".gitattributes": "*.parquet filter=lfs\n",
    "README.md": "---\nlicense: mit\n---\n# Rows\n",
    "LICENSE": "text",
    "notes.txt": "text\n",
    "script.py": "pass\n",
    "dataset_infos.json": "{}",
    "config.json": "{}",
    "part/dataset_info.json": "{}",
    "part/state.json": "{}",
}


def test_other_files_of_a_folder_are_ignored(tmp_path: Path) -> None:
    folder = fill(tmp_path / "rows", {"part/x.jsonl": letters("x"), "A.JSONL": letters("a")})
    before = Source(DataEntry(path=str(folder)), "train", "demonstration").digest()
    fill(folder, IGNORED)
    assert texts(folder) == "ax"
    assert Source(DataEntry(path=str(folder)), "train", "demonstration").digest() == before


def test_a_folder_of_empty_files_has_no_rows(tmp_path: Path) -> None:
    fill(tmp_path, {"a.jsonl": "", "b.csv": "text\n", "c.csv": "", "d.parquet": ""})
    with pytest.raises(RLHFError) as caught:
        examples_of(str(tmp_path))
    assert str(caught.value) == f"data.train: no rows in {tmp_path}"


CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: [en/*.jsonl]}
  - {split: dev, path: "en/dev*"}
- config_name: de
  data_files: de/*
---
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one split": {"b.jsonl": letters("b"), "a/c.jsonl": letters("c"), "trains.jsonl": letters("t")},
    "names of files": {
        "train.jsonl": letters("tu"), "test.jsonl": letters("e"), "extra.jsonl": letters("x"),
        "my_dev-1.jsonl": letters("d"), "constrain.jsonl": letters("c"),
    },
    "names of folders": {
        "train/a.jsonl": letters("t"), "valid/test.jsonl": letters("v"), "c.jsonl": letters("c"),
        "en/train_2/b.jsonl": letters("u"),
    },
    "shards": {
        "data/train-00000-of-00002.parquet": letters("t"),
        "data/train-00001-of-00002.parquet": letters("u"),
        "data/train_prefs-00000-of-00001.parquet": letters("p"),
        "test.jsonl": letters("e"),
    },
    "a card": {
        "README.md": CARD, "en/1.jsonl": letters("1"), "en/2.jsonl": letters("2"),
        "en/dev.jsonl": letters("d"), "de/x.jsonl": letters("x"),
    },
}  # fmt: skip
READ = [
    ("one split", {}, "cbt"),
    ("one split", {"subset": "default"}, "cbt"),
    ("one split", {"split": "train[1:]"}, "bt"),
    ("one split", {"split": "test"}, "{} has no split 'test'; available: train"),
    ("one split", {"subset": "en"}, "{} has no subsets; remove subset"),
    ("names of files", {}, "tu"),
    ("names of files", {"split": "test"}, "e"),
    ("names of files", {"split": "validation"}, "d"),
    ("names of files", {"split": "train[:50%]+test"}, "te"),
    ("names of files", {"split": "test+train"}, "etu"),
    ("names of files", {"split": "all"}, "tude"),
    (
        "names of files", {"split": "dev"},
        "{} has no split 'dev'; available: train, validation, test",
    ),
    (
        "names of files", {"split": "train[x]"},
        "cannot read {}: Unrecognized instruction format: train[x]",
    ),
    ("names of folders", {}, "tu"),
    ("names of folders", {"split": "validation"}, "v"),
    ("shards", {}, "tu"),
    ("shards", {"split": "train_prefs"}, "p"),
    ("a card", {}, "cannot read {}: Config name is missing"),
    ("a card", {"subset": "en"}, "12d"),
    ("a card", {"subset": "en", "split": "dev"}, "d"),
    ("a card", {"subset": "de"}, "x"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "options", "expected"), READ)
def test_a_folder_in_the_layout_of_a_repository_has_its_subsets_and_splits(
    layout: str, options: dict[str, str], expected: str, tmp_path: Path
) -> None:
    folder = fill(tmp_path / "rows", LAYOUTS[layout])
    if len(expected) < 6:
        assert texts(folder, **options) == expected
        return
    with pytest.raises(RLHFError) as caught:
        texts(folder, **options)
    assert str(caught.value) == f"data.train: {expected.format(folder)}"


def test_a_split_has_the_files_that_datasets_chooses(tmp_path: Path) -> None:
    for number, layout in enumerate(["names of files", "names of folders", "shards"]):
        folder = fill(tmp_path / str(number), LAYOUTS[layout])
        loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "own"))
        for split, rows in loaded.items():
            assert texts(folder, split=str(split)) == "".join(rows["text"])


def test_only_the_files_that_are_read_decide_the_key_of_the_cache(tmp_path: Path) -> None:
    folder = fill(tmp_path / "rows", LAYOUTS["names of files"])
    train = Source(DataEntry(path=str(folder)), "train", "demonstration")
    both = Source(DataEntry(path=str(folder), split="train+test"), "train", "demonstration")
    before = train.digest(), both.digest()
    (folder / "test.jsonl").write_text('{"text": "n"}\n')
    assert train.digest() == before[0]
    assert both.digest() != before[1]
    (folder / "train.jsonl").rename(folder / "train-1.jsonl")  # The name is in messages.
    assert train.digest() != before[0]
