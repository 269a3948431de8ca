"""The names of files and folders are names: no character in them is a pattern or a part of a URL,
and the key of the cache is of the bytes that are read."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numbered_words import examples_of, ids

from rlhf.config.sections import DataEntry
from rlhf.data.files import Source
from rlhf.errors import RLHFError

pytestmark = pytest.mark.usefixtures("cache")

NAMES = ["part[1]", "part?", "part*", "a::b", "{a,b}", "~root", "50%", "#1", " a b ", "a:b", "[!x]"]
NEIGHBOURS = ["part1", "part2", "b", "a"]
"""Names that the others match as patterns."""


def write_csv(path: Path, row: dict[str, str]) -> None:
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")


def write_parquet(path: Path, row: dict[str, str]) -> None:
    with path.open("wb") as file:
        pq.write_table(pa.Table.from_pylist([row]), file)


def write_arrow(path: Path, row: dict[str, str]) -> None:
    table = pa.Table.from_pylist([row])
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def write_json(path: Path, row: dict[str, str]) -> None:
    path.write_text(json.dumps(row) + "\n")


TYPES = {".csv": write_csv, ".parquet": write_parquet, ".arrow": write_arrow, ".jsonl": write_json}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", TYPES)
def test_a_file_or_folder_of_any_name_is_the_one_that_is_read(
    name: str, suffix: str, tmp_path: Path
) -> None:
    write = TYPES[suffix]
    for each, word in ((name, "w1"), *((other, "w2") for other in NEIGHBOURS)):
        folder = tmp_path / each
        folder.mkdir()
        write(folder / f"{each}{suffix}", {"text": word})
        write(tmp_path / f"{each}{suffix}", {"text": word})
    for path in (
        tmp_path / f"{name}{suffix}",
        tmp_path / name / f"{name}{suffix}",
        tmp_path / name,
    ):
        assert ids(examples_of(str(path))) == [([], [3, 1])], path


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_any_name_that_datasets_reads_is_the_one(name: str, tmp_path: Path) -> None:
    for each, word in ((name, "w1"), *((other, "w2") for other in NEIGHBOURS)):
        (tmp_path / each).mkdir()
        (tmp_path / each / "lines.txt").write_text(f"{word}\n")
    assert ids(examples_of(str(tmp_path / name))) == [([], [3, 1])]


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_folder_of_any_name_is_the_one_that_is_read(name: str, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "w1"}]).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / name)
    assert ids(examples_of(str(tmp_path / name))) == [([], [3, 1])]


@pytest.mark.parametrize("suffix", TYPES)
def test_new_bytes_of_a_file_are_read_again(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    path = folder / f"part[1]{suffix}"
    TYPES[suffix](folder / f"part1{suffix}", {"text": "w3"})
    for word, token in (("w1", 3), ("w2", 4)):
        TYPES[suffix](path, {"text": word})
        assert ids(examples_of(str(path))) == [([], [token, 1])]
        assert ids(examples_of(str(folder))) == [([], [5, 1]), ([], [token, 1])]


def test_an_error_of_datasets_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    for name, reason in (
        ("none", "The directory at {} doesn't contain any data files"),
        ("saved", "Directory {} is neither a `Dataset` directory nor a `DatasetDict` directory"),
    ):
        folder, scratch = tmp_path / name, tmp_path / f"scratch-{name}"
        scratch.mkdir()
        with pytest.raises(RLHFError) as caught:
            Source(DataEntry(path=str(folder)), "eval", "demonstration").read(scratch)
        expected = f"data.eval: cannot read {folder}: {reason.format(folder)}"
        assert str(caught.value) == expected
