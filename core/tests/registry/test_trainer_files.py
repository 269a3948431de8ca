"""Trainers in files that are not installed: how they are found, and every error word for word."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.data import cache
from rlhf.errors import RLHFError
from rlhf.registry.imports import load_object
from rlhf.registry.trainer_files import NoSettings, load_trainer
from rlhf.request.reader import read_config

Write = Callable[[str, str], Path]
TRAINERS = """
    from attrs import frozen
    from rlhf.trainer import Trainer

    @frozen(kw_only=True)
    class Settings:
        '''Settings of the file.'''
        power: float = 1.0
        '''Exponent.'''

    class Bare(Trainer):
        def example(self, row): ...
        def setup(self, run): ...
        def loss(self, batch): ...

    class Powered(Bare):
        config: Settings

    class Partial(Trainer):
        def example(self, row): ...

    class Wrong(Bare):
        config: int

    class Unknown(Bare):
        config: "Nowhere"
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the current folder, which is not on sys.path."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    written = []

    def write(name: str, source: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        written.append(name)
        return path

    yield write
    for name in written:
        if name not in ("wave", "optim"):
            sys.modules.pop(name, None)


def error_of(name: str) -> str:
    with pytest.raises(RLHFError) as caught:
        load_trainer(name)
    return str(caught.value)


def test_the_annotation_of_config_names_the_settings_and_the_file_the_section(write: Write) -> None:
    path = write("file_trainers", TRAINERS)
    trainer, record = load_trainer("./file_trainers.py:Powered")
    assert (trainer.name, trainer.value) == ("file_trainers", f"{path}:Powered")
    assert record.config.__name__ == "Settings"
    assert load_object(record.trainer).__name__ == "Powered"
    assert load_trainer("file_trainers.py:Bare")[1].config is NoSettings


@pytest.mark.usefixtures("toy")
def test_the_configuration_of_a_file_is_found_again_from_any_folder(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("file_trainers", TRAINERS)
    words = ["--file_trainers.power", "2"]
    request = read_config("file_trainers.py:Powered", overrides=words, inputs=False)
    assert (request.name, request.config.own.power) == ("file_trainers", 2.0)
    assert request.trainer == f"{path}:Powered"
    monkeypatch.chdir("/")
    assert read_config(request.trainer, inputs=False).name == "file_trainers"


def test_an_invalid_trainer_file_is_reported_in_one_line(write: Write) -> None:
    path = write("file_trainers", TRAINERS)
    write("unreadable", "raise ValueError('at import')")
    write("wave", TRAINERS)
    write("optim", TRAINERS)
    expected = {
        "nowhere.py:Bare": "nowhere.py, the file of a trainer, does not exist; correct the path "
        "(for a run folder: `trainer` in its versions.json)",
        "file_trainers.py": "file_trainers.py names no class; write file_trainers.py:CLASS, as in "
        "file_trainers.py:MyTrainer",
        "file_trainers.py:Pwered": "file_trainers.py has no class 'Pwered' (did you mean "
        "'Powered'?); its trainers: Bare, Powered, Partial, Wrong, Unknown",
        "file_trainers.py:Settings": "file_trainers.py:Settings is not a subclass of "
        "rlhf.trainer.Trainer",
        "file_trainers.py:Partial": "file_trainers.py:Partial does not define loss, setup",
        "file_trainers.py:Wrong": "file_trainers.py: Wrong annotates config with <class 'int'>, "
        "which is not an attrs class",
        "file_trainers.py:Unknown": "file_trainers.py: the annotations of Unknown cannot be read: "
        "name 'Nowhere' is not defined",
        "unreadable.py:Bare": f"{path.with_name('unreadable.py')} cannot be imported: ValueError: "
        f"at import (`python {path.with_name('unreadable.py')}` shows where)",
        "optim.py:Bare": "optim.py: its name 'optim' is reserved for core; rename the file",
    }
    assert {name: error_of(name) for name in expected} == expected
    assert error_of("wave.py:Bare").startswith(
        f"{path.with_name('wave.py')} has the name of another module, "
    )


def test_a_change_of_the_file_or_beside_it_renews_the_cache_of_rows(write: Write) -> None:
    def digest() -> list[str]:
        cache._python_digest.cache_clear()
        return cache._sources(load_object(record.trainer)(SimpleNamespace(), None))

    write("file_helper", "size = 7")
    write("file_trainers", TRAINERS)
    _, record = load_trainer("file_trainers.py:Powered")
    first = digest()
    assert digest() == first
    write("file_helper", "size = 9")
    second = digest()
    assert second != first
    write("file_trainers", TRAINERS + "\n    # changed\n")
    assert digest() not in (first, second)
