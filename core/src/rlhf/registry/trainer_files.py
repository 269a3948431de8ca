"""A trainer in a file that is not installed: `rlhf run ./my_trainer.py:MyTrainer`."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from rlhf.errors import RLHFError, first_line, nearest
from rlhf.plugin import NoSettings, TrainerPlugin
from rlhf.registry.imports import (
    add_to_path,
    check_trainer,
    import_errors,
    load_object,
    load_record,
)
from rlhf.registry.installed import Installed, find, name_problem


def load_trainer(name: str) -> tuple[Installed, TrainerPlugin]:
    """Return a trainer and its record: of the class that FILE.py:CLASS names, or of an installed
    distribution."""
    file, _, cls = name.partition(":")
    if file.endswith(".py"):
        return _load_file(file, cls)
    trainer = find("trainer", name)
    return trainer, load_record(trainer)


def _load_file(file: str, cls: str) -> tuple[Installed, TrainerPlugin]:
    if not cls:
        raise RLHFError(f"{file} names no class; write {file}:CLASS, as in {file}:MyTrainer")
    path = Path(file).resolve()
    if not path.is_file():
        raise RLHFError(
            f"{file}, the file of a trainer, does not exist; correct the path (for a run folder: "
            "`trainer` in its versions.json)"
        )
    if problem := name_problem("trainer", path.stem):
        raise RLHFError(f"{file}: {problem}; rename the file")
    trainer = Installed(
        name=path.stem, kind="trainer", distribution=str(path), version="", summary="",
        value=f"{path}:{cls}",
    )  # fmt: skip
    return trainer, _record(_class_in(_import(path), cls, file), f"{path.stem}:{cls}", file)


def _import(path: Path) -> ModuleType:
    """Import the file as the module of its name, so that other processes find its classes."""
    add_to_path(path.parent)
    importlib.invalidate_caches()
    with import_errors(path, f"python {path}"):
        module = importlib.import_module(path.stem)
    other = getattr(module, "__file__", None)
    if other is None or not Path(other).samefile(path):
        raise RLHFError(f"{path} has the name of another module, {other or path.stem}; rename it")
    return module


def _class_in(module: ModuleType, name: str, file: str) -> Any:
    if not hasattr(module, name):
        base = load_object("rlhf.trainer:Trainer")
        trainers = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, base) and value is not base
        ]
        near = nearest(name, trainers)
        hint = f" (did you mean '{near}'?)" if near else ""
        raise RLHFError(
            f"{file} has no class '{name}'{hint}; its trainers: {', '.join(trainers) or 'none'}"
        )
    found = getattr(module, name)
    check_trainer(found, f"{file}:{name}")
    return found


def _record(trainer: Any, value: str, file: str) -> TrainerPlugin:
    """Return the record of a class, whose settings are the class that annotates `config`."""
    try:
        # Of the class that has it only: those of `Trainer` name what only type checkers import.
        owner = next(
            (it for it in trainer.__mro__ if "config" in inspect.get_annotations(it)), None
        )
        own = inspect.get_annotations(owner, eval_str=True) if owner else {"config": NoSettings}
        config = own["config"]
    except Exception as error:  # An annotation may be any expression.
        raise RLHFError(
            f"{file}: the annotations of {trainer.__name__} cannot be read: {first_line(error)}"
        ) from error
    if not (isinstance(config, type) and attrs.has(config)):
        raise RLHFError(
            f"{file}: {trainer.__name__} annotates config with {config!r}, which is not an attrs "
            "class"
        )
    return TrainerPlugin(config=config, trainer=value)
