"""The names that transformers finds in the sources of all its models at each import, kept on disk
until one of these files changes."""

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import RLHFError
from rlhf.launch.caches import cache_root

MODULE = "transformers.utils.import_utils"
READ = "create_import_structure_from_path"
"""Its function that reads a folder, or the folder of a file. Another version may have none."""


@contextmanager
def keeping_model_names() -> Iterator[None]:
    """Have transformers, if the body imports it, read the sources of its models only if one has
    changed since the last time, and not once more for another path of the same folder."""
    finder = _Finder()
    # A new list each time, since another thread may import while this one does.
    sys.meta_path = [finder, *sys.meta_path]
    try:
        yield
    finally:
        sys.meta_path = [each for each in sys.meta_path if each is not finder]


class _Finder(MetaPathFinder):
    """Finds `MODULE`, whose function is replaced before transformers calls it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            read = getattr(module, READ, None)
            if read is not None and spec.origin is not None:
                setattr(module, READ, kept(read, Path(spec.origin)))

        loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def kept(read: Callable[[Any], Any], reader: Path) -> Callable[[Any], Any]:
    """Return `read`, whose result for the folder of all models is kept on disk. `reader` is the
    file that defines it, in a subfolder of transformers."""
    models = reader.parents[1] / "models"

    @cache
    def read_models() -> Any:
        try:
            state = [*_state_of(reader), *_states_below(models)]
            place = kept_at(models)
        except (OSError, RLHFError):
            return read(models)
        with suppress(Exception):  # Nothing is kept yet, or the file is damaged.
            before, names = marshal.loads(place.read_bytes())
            if before == state:
                return names
        names = read(models)
        with suppress(OSError, ValueError):  # The cache may not be writable.
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_suffix(f".{os.getpid()}")
            try:
                part.write_bytes(marshal.dumps((state, names)))
                part.replace(place)
            finally:
                part.unlink(missing_ok=True)
        return names

    def read_folder(module_path: str | Path) -> Any:
        path = Path(module_path)
        folder = path if path.is_dir() else path.parent
        return read_models() if folder == models else read(folder)

    return read_folder


def kept_at(models: Path) -> Path:
    """Return the file with the names below a folder, as this version of Python writes it. Raises
    RLHFError if the user has no home."""
    key = hashlib.sha256(f"{sys.version} {models}".encode()).hexdigest()[:16]
    return cache_root() / "names" / key


def _states_below(folder: Path) -> Iterator[str | int]:
    """Yield path, size and time of the last change of each file."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=attrgetter("name")):
            if entry.is_dir() and entry.name != "__pycache__":
                yield from _states_below(Path(entry.path))
            elif entry.is_file():
                yield from _state_of(entry)


def _state_of(file: os.DirEntry[str] | Path) -> tuple[str, int, int]:
    state = file.stat()
    return os.fspath(file), state.st_size, state.st_mtime_ns
