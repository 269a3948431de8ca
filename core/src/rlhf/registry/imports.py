"""Stages 1 and 2 of a plugin: its record is loaded, then the objects that its strings name."""

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from rlhf.config.source_names import DEMO
from rlhf.errors import RLHFError, first_line
from rlhf.plugin import RECORDS, DemoPlugin, TrainerPlugin
from rlhf.registry.installed import Installed, NotInstalled, find, installed, is_satisfied


def load_record(plugin: Installed) -> Any:
    """Stage 1: return the record that the entry point names."""
    record = load_object(plugin.value, plugin)
    expected = RECORDS[plugin.kind]
    if not isinstance(record, expected):
        kinds = f"is a {type(record).__name__}, not a rlhf.plugin.{expected.__name__}"
        raise RLHFError(f"{plugin}: {plugin.value} {kinds}")
    if hasattr(record, "config") and not attrs.has(record.config):
        raise RLHFError(f"{plugin}: its config {record.config!r} is not an attrs class")
    for requirement in getattr(record, "requires", ()):
        if not is_satisfied(requirement):
            raise NotInstalled(f"{plugin} needs {requirement}; run `pip install '{requirement}'`")
    return record


def check_trainer(trainer: Any, path: str) -> None:
    """Raise RLHFError unless `trainer`, which `path` names, is a trainer's class."""
    base = load_object("rlhf.trainer:Trainer")
    if not (isinstance(trainer, type) and issubclass(trainer, base)):
        raise RLHFError(f"{path} is not a subclass of rlhf.trainer.Trainer")
    if missing := sorted(getattr(trainer, "__abstractmethods__", ())):
        raise RLHFError(f"{path} does not define {', '.join(missing)}")


def complete_export(
    folder: Path, run: Path, *, role: str = "policy", until: float = math.inf
) -> None:
    """Have every `ExportPlugin` add its files to the model folder `folder` of a run. One that fails
    costs nobody the model: it is named in a warning."""
    for plugin in (each for each in installed() if each.kind == "export"):
        try:
            load_object(load_record(plugin).write, plugin)(folder, run, role=role, until=until)
        except Exception as error:  # It may raise anything.
            print(f"warning: the {plugin} has not added its files: {first_line(error)}", flush=True)


def demo_file(plugin: Installed, record: TrainerPlugin) -> Path:
    """Return the path of the trainer's demo YAML, in the folder of the module of its record."""
    if record.demo is None:
        raise RLHFError(f"{plugin} has no demo; pass --model and --data")
    return Path(str(sys.modules[plugin.value.partition(":")[0]].__file__)).with_name(record.demo)


def demo_plugin(path: str) -> DemoPlugin:
    """Return the record of `path`, which is `demo:NAME`."""
    record: DemoPlugin = load_record(find("demo", path.removeprefix(DEMO)))
    return record


def demo_maker(format: str) -> Callable[..., dict[str, Any]]:
    """Return `FormatPlugin.demo` of a plugin's row format."""
    plugin = find("format", format)
    path = load_record(plugin).demo
    if path is None:
        raise RLHFError(f"{plugin} has no demo rows; give data.train files of your own")
    maker: Callable[..., dict[str, Any]] = load_object(path, plugin)
    return maker


def load_object(path: str, plugin: Installed | None = None) -> Any:
    """Stage 2: return what the import string `module:name` names.

    `plugin` is the plugin that names it, for the error's text.
    """
    module, _, name = path.partition(":")
    with import_errors(plugin or path, f"python -c 'import {module}'"):
        loaded = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(loaded, part):
                place = _place_of(path, plugin)
                raise RLHFError(f"{plugin or path}: no '{name}' in {module}; correct {place}")
            loaded = getattr(loaded, part)
        return loaded


def _place_of(path: str, plugin: Installed | None) -> str:
    """Return where an import string is written."""
    if plugin is None or path == plugin.value:
        return "the entry point" if plugin else path
    record = attrs.asdict(load_record(plugin), recurse=False)
    return next(f"{name}=" for name, value in record.items() if value == path)


@contextmanager
def import_errors(what: object, command: str) -> Iterator[None]:
    """Raise RLHFError for what an import raises. `command` shows where."""
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:  # The module of a plugin or of a user may raise anything.
        raise RLHFError(
            f"{what} cannot be imported: {type(error).__name__}: {first_line(error)} "
            f"(`{command}` shows where)"
        ) from error


def load_user_object(path: str) -> Any:
    """Return what a user's own import string `module:name` names.

    The module may lie in the current folder, which is not on the path of the command `rlhf`. The
    folder is appended, so that none of the user's files shadows an installed module.
    """
    add_to_path(Path.cwd())
    return load_object(path)


def add_to_path(folder: Path) -> None:
    """Let modules in `folder` be imported, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
