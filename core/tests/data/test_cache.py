"""Tokenised rows are cached, and computed again only when something has changed."""

import errno
import importlib
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numbered_words import (
    ROWS,
    Demonstrations,
    Section,
    examples_of,
    write_lines,
)

from rlhf.data.cache import key, module_digest, once
from rlhf.data.example import Example

pytestmark = pytest.mark.usefixtures("cache")


class Counting(Demonstrations):
    calls = 0

    def example(self, row: Any) -> Example:
        Counting.calls += 1
        return super().example(row)


def test_rows_are_tokenised_once_and_again_only_when_something_has_changed(tmp_path: Path) -> None:
    count = partial(examples_of, trainer=Counting)
    path = write_lines(tmp_path / "rows.jsonl")
    count(path)
    count(path)
    moved = write_lines(tmp_path / "moved.jsonl")
    count(moved, batch={"tokens": 100})
    assert Counting.calls == 10
    count(path, section=Section(beta=0.2))
    count(path, data={"max_tokens": 63})
    assert Counting.calls == 30
    write_lines(tmp_path / "rows.jsonl", ROWS[:5])
    count(path)
    assert Counting.calls == 35
    count(path, template="{{ messages }}")
    count(path, template="{{ messages }}")
    assert Counting.calls == 40


def test_rows_are_tokenised_where_a_file_in_use_cannot_be_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a file that is mapped in its folder."""
    remove = os.rmdir

    def refuse(path: Any, **options: Any) -> None:
        if re.match("tmp|.*-rows-", Path(path).name):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        assert len(examples_of(write_lines(tmp_path / "rows.jsonl"))) == len(ROWS)
    assert [path.name for path in cache.rglob("examples.arrow")] == ["examples.arrow"]


def test_a_damaged_cache_is_tokenised_again(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl")
    examples_of(path, trainer=Counting)
    for file in (file for file in cache.rglob("*") if file.suffix in (".arrow", ".json")):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        Counting.calls = 0
        examples_of(path, trainer=Counting)
        assert Counting.calls == 10


ROW_READER = """
from rows_of_mine.helper import tokens
from rlhf.data.example import Answer, Example
from rlhf.trainer import Trainer

class Mine(Trainer):
    def example(self, row):
        return Example([2], [Answer(tokens())])
    def setup(self, run): ...
    def loss(self, batch): ...
"""


def test_rows_are_tokenised_again_when_another_module_of_the_package_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "rows.jsonl")
    lengths = []
    for version, helper in enumerate(["[3, 4]", "[3, 4]", "[3, 4, 5]"]):
        folder = tmp_path / str(version) / "rows_of_mine"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "trainer.py").write_text(ROW_READER)
        (folder / "helper.py").write_text(f"def tokens():\n    return {helper}\n")
        for name in [name for name in sys.modules if name.startswith("rows_of_mine")]:
            del sys.modules[name]
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder.parent)
            trainer = importlib.import_module("rows_of_mine.trainer").Mine
            lengths.append(examples_of(path, trainer=trainer).lengths.tolist())
    assert lengths == [[3] * 10, [3] * 10, [4] * 10]
    entries = (tmp_path / "cache" / "examples").iterdir()
    assert len([entry for entry in entries if entry.is_dir()]) == 2


@pytest.mark.parametrize(
    ("beside", "counts"), [("mine.egg-info", True), ("other-1.0.dist-info", False)]
)
def test_a_file_beside_a_module_counts_unless_it_is_of_another_distribution(
    beside: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for version in "ab":
        folder = tmp_path / version
        (folder / beside).mkdir(parents=True)
        (folder / "rows_of_one_file.py").write_text("import helper_beside\n")
        (folder / "helper_beside.py").write_text(version)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            digests.add(module_digest("rows_of_one_file"))
        assert "rows_of_one_file" not in sys.modules
    assert len(digests) == 1 + counts


FORMAT = """
from rlhf.plugin import FormatPlugin
plugin = FormatPlugin(read="rows_of_theirs:read")
def read(row, reader):
    return [VALUE]
"""


def test_the_source_of_a_row_format_decides_on_what_rows_become(
    tmp_path: Path, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Theirs(Demonstrations):
        row_format = "theirs"

    monkeypatch.setattr("rlhf.data.cache.tokenizer_digest", lambda tokenizer: "")
    keys = []
    for number, value in enumerate("aab"):
        source = FORMAT.replace("VALUE", value)
        groups = {"formats": {"theirs": "rows_of_theirs:plugin"}}
        sys.modules.pop("rows_of_theirs", None)
        install("rlhf-theirs", groups, {"rows_of_theirs": source}, folder=tmp_path / str(number))
        keys.append(key(Theirs(Section(), None), None))
    assert keys[0] == keys[1] != keys[2]


def test_the_cache_holds_no_pickles(tmp_path: Path, cache: Path) -> None:
    examples_of(write_lines(tmp_path / "rows.jsonl"))
    files = {file.name for file in cache.rglob("*") if file.is_file() and file.suffix != ".lock"}
    assert files == {"digests.json", "examples.arrow", "examples.sha256", "report.json"}


def build_slowly(folder: Path, log: Path) -> None:
    def build(part: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        (part / "done").write_text("x")

    once(folder, build)
    assert (folder / "done").exists()


def test_one_of_many_processes_writes_and_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    folder, log = tmp_path / "entry", tmp_path / "log"
    workers = [context.Process(target=build_slowly, args=(folder, log)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert log.read_text() == "built\n"


def die_while_building(folder: Path) -> None:
    def build(part: Path) -> None:
        part.with_name(f"{part.name}-rows-1").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)

    once(folder, build)


def test_a_builder_that_dies_is_replaced(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    folder, log = tmp_path / "entry", tmp_path / "log"
    first = context.Process(target=die_while_building, args=(folder,))
    first.start()
    first.join()
    assert first.exitcode == -signal.SIGKILL
    assert not folder.exists()
    (tmp_path / "entry-elsewhere-1").mkdir()
    build_slowly(folder, log)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["entry", "entry-elsewhere-1"]
    assert log.read_text() == "built\n"
