"""The same rows give the same token ids, whichever file and whichever spelling holds them."""

import csv
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHATML, NAMED, TOOLS, calls_as, tokenizer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from read_rows import read_rows

from rlhf.config.sections import DataEntry
from rlhf.data.files import Source
from rlhf_rows import Reader

Row = dict[str, Any]
TEMPLATES = [CHATML, NAMED, TOOLS, calls_as("{{ f | tojson }}"), calls_as("{{ '' + f.arguments }}")]
READERS = [Reader(tokenizer_of("bytes", template)) for template in TEMPLATES]
WORDS = st.text(alphabet="ab 1\n\"',é中\\{}[]<>", max_size=8).map(lambda text: f"w{text}")
MAYBE = st.none() | WORDS


@st.composite
def turns(draw: st.DrawFn, *, calls: bool) -> list[Row]:
    """Questions and answers, with keys that may be null, some answers after a call."""
    out: list[Row] = []
    if draw(st.booleans()):
        out.append({"role": "system", "content": draw(WORDS)})
    for _ in range(draw(st.integers(1, 2))):
        out.append({"role": "user", "content": draw(WORDS), "name": draw(MAYBE)})
        if calls and draw(st.booleans()):
            arguments = {"city": draw(WORDS), "days": draw(st.integers(0, 9))}
            call = {"id": draw(MAYBE), "type": "function",
                    "function": {"name": "rain", "arguments": json.dumps(arguments)}}  # fmt: skip
            out.append({"role": "assistant", "content": None, "tool_calls": [call]})
            out.append({"role": "tool", "content": draw(WORDS)})
        empty = draw(st.sampled_from([{}, {"tool_calls": None}, {"tool_calls": []}]))
        out.append({"role": "assistant", "content": draw(WORDS)} | empty)
    return out


def as_sharegpt(messages: list[Row]) -> list[Row]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[each["role"]], "value": each["content"]} for each in messages]


@st.composite
def rows(draw: st.DrawFn) -> tuple[str, list[Row]]:
    """A format and rows of it, all of one shape, as a table needs them."""
    shape = draw(st.sampled_from(["messages", "completion", "pair", "sharegpt", "text", "label"]))
    out: list[Row] = []
    for _ in range(draw(st.integers(1, 3))):
        *before, answer = draw(turns(calls=shape in ("messages", "completion")))
        other = {"role": "assistant", "content": draw(WORDS) + " no"}
        extra = {"system": draw(st.sampled_from([None, "be kind"]))}
        extra = {} if before[0]["role"] == "system" else extra
        if shape == "messages":
            row = {"messages": [*before, answer]}
        elif shape == "completion":
            row = {"prompt": before, "completion": [answer]}
        elif shape == "pair":
            row = {"prompt": before, "chosen": [answer], "rejected": [other]}
        elif shape == "sharegpt":
            row = {"conversations": as_sharegpt([*before, answer])}
        elif shape == "text":
            row = {"prompt": draw(WORDS), "chosen": "yes", "rejected": draw(WORDS)}
        else:
            row = {"prompt": before, "completion": answer["content"], "label": True}
        out.append(row | extra)
    format = {"pair": "preference", "text": "preference", "label": "unpaired"}
    return format.get(shape, "demonstration"), out


def write_csv(path: Path, rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            texts = {
                name: it if isinstance(it, str) else json.dumps(it) for name, it in row.items()
            }
            writer.writerow({name: it for name, it in texts.items() if row[name] is not None})


def with_all_columns(rows: list[Row]) -> list[Row]:
    """The rows as a table has them: writers of tables take the columns of the first one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


WRITERS: dict[str, Callable[[Path, list[Row]], Any]] = {
    "rows.jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows))),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "rows.csv": write_csv,
    "rows.parquet": lambda path, rows: pq.write_table(
        pa.Table.from_pylist(with_all_columns(rows)), path
    ),
    "saved": lambda path, rows: datasets.Dataset.from_list(with_all_columns(rows)).save_to_disk(
        str(path)
    ),
}


def ids_of(path: Path, format: str, reader: Reader, scratch: Path) -> list[Any]:
    """Token ids of all rows of a file, or the end of the error."""
    source = Source(DataEntry(path=str(path)), "train", format)
    scratch.mkdir()
    table = source.read(scratch)
    out = []
    for number in range(len(table)):
        where, row = source.row(table[number], number)
        try:
            (made,) = read_rows(format, [(where, row)], reader)
        except Exception as error:
            out.append(str(error).removeprefix(f"{where}: "))
        else:
            out.append([(each.prompt, each.answers) for each in made])
    return out


def check_files(format: str, rows: list[Row], reader: Reader) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, write in WRITERS.items():
            write(Path(folder) / name, rows)
            scratch = Path(folder) / f"scratch of {name}"
            found[name] = ids_of(Path(folder) / name, format, reader, scratch)
    expected = found["rows.jsonl"]
    assert len(expected) == len(rows)
    for name, ids in found.items():
        assert ids == expected, name


SLOW = [HealthCheck.too_slow]


@pytest.mark.usefixtures("quiet_datasets")
@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(rows(), st.sampled_from(READERS))
def test_all_files_of_the_same_rows_give_the_same_ids(made: Any, reader: Reader) -> None:
    check_files(*made, reader)


@pytest.mark.matrix
@pytest.mark.usefixtures("quiet_datasets")
@settings(max_examples=300, deadline=None, database=None, derandomize=True,
          suppress_health_check=SLOW)  # fmt: skip
@given(rows(), st.sampled_from(READERS))
def test_files_of_many_rows_give_the_same_ids(made: Any, reader: Reader) -> None:
    check_files(*made, reader)


@pytest.fixture(scope="module")
def quiet_datasets() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
