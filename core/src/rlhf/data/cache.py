"""The cache of tokenised rows: addressed by content, written once per host."""

import functools
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
from filelock import FileLock

from rlhf.folder.disk import sha256, writing
from rlhf.launch.signals import PARENT
from rlhf.registry.installed import installed

POLL_SECONDS = 0.2
DIGESTS = "digests.json"


def once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `build(temporary folder)` unless it exists and is intact.

    One process builds and the others wait for it; if it dies, the next one builds. The folder is
    complete or absent.
    """
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not _is_intact(folder):
            with FileLock(folder.with_suffix(".lock")).acquire(poll_interval=POLL_SECONDS):
                if not _is_intact(folder):
                    _remove(folder)
                    # Builds of this host that were killed left these. None runs: we have the lock.
                    for path in folder.parent.glob(f"{_prefix(folder)}*"):
                        shutil.rmtree(path, ignore_errors=True)
                    _build(folder, build)
    return folder


def key(trainer: Any, tokenizer: Any, **parts: Any) -> str:
    """Return a digest of everything that decides what a row becomes: the tokenizer, its template,
    the trainer's section, its sources and those of all row formats, what else it reads, core's
    version and sources, and `parts`."""
    section = trainer.config
    content = {
        "parts": parts,
        "tokenizer": tokenizer_digest(tokenizer),
        "section": attrs.asdict(section) if attrs.has(type(section)) else None,
        "row_sources": trainer.row_sources,
        "trainer": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(trainer).__mro__],
        "sources": _sources(trainer),
        "version": metadata.version("rlhf-core"),
    }
    return _sha(json.dumps(content, sort_keys=True, default=repr))


def _is_intact(folder: Path) -> bool:
    """Return whether the folder has the files that were written, none of them damaged since. The
    ranks of a launcher that has checked them before look only at their names."""
    checked = PARENT in os.environ
    try:
        digests = dict(json.loads((folder / DIGESTS).read_text(encoding="utf-8")))
        return all(
            (folder / name).is_file() if checked else sha256(folder / name) == digest
            for name, digest in digests.items()
        )
    except (FileNotFoundError, ValueError, TypeError):
        return False


def _remove(folder: Path) -> None:
    """Remove a damaged folder at once; a run that reads it keeps its files."""
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
        folder.rename(aside / "damaged")
        shutil.rmtree(aside, ignore_errors=True)


def _prefix(folder: Path) -> str:
    """Return how the names of temporary folders begin: with the host, since locks may not reach
    another one, and a character that no host's name has."""
    return f"{folder.name}-{socket.gethostname()}@"


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    part = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
    try:
        build(part)
        digests = {path.name: sha256(path) for path in part.iterdir()}
        (part / DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        part.rename(folder)
    except OSError:
        # Another host wrote the same to a shared folder: locks do not reach across all file
        # systems.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary, special tokens and chat template."""
    if tokenizer.is_fast:
        # Every call sets padding and truncation, which mean nothing here.
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
        vocabulary = tokenizer.backend_tokenizer.to_str()
    else:
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special: Mapping[str, Any] = tokenizer.special_tokens_map
    extra = json.dumps(
        [type(tokenizer).__qualname__, special, tokenizer.chat_template], default=str
    )
    return _sha(vocabulary + extra)


def _sources(trainer: Any) -> list[str]:
    """Return digests of the packages of the trainer's classes and of all row formats, since a
    trainer without one may encode rows with them, and of core's data room.

    A helper module may decide what `example` returns as much as the trainer's own, so the whole
    top-level package counts, or all Python files in the folder of a single one.
    """
    names = {kind.__module__ for kind in type(trainer).__mro__} - {"builtins", "abc", "typing"}
    names |= {plugin.value.partition(":")[0] for plugin in installed() if plugin.kind == "format"}
    outside = {name.partition(".")[0] for name in names} - {"rlhf"}
    core = {name for name in names if name.startswith("rlhf.")}
    return [module_digest(name) for name in sorted({*outside, *core, "rlhf.data"})]


def module_digest(name: str) -> str:
    """Return a digest of the Python files of a package, or of a module and those beside it; the
    module's name if it has no file. Nothing is imported."""
    module: Any = sys.modules.get(name) or find_spec(name)
    packages = getattr(module, "__path__", getattr(module, "submodule_search_locations", None))
    if packages:
        return "".join(_python_digest(Path(path), "**/*.py") for path in packages) or name
    file = getattr(module, "__file__", getattr(module, "origin", None))
    if not file:
        return name
    path = Path(file)
    # In site-packages there are other distributions beside it.
    alone = any(path.parent.glob("*.dist-info"))
    return _python_digest(path.parent, path.name if alone else "*.py")


@functools.cache
def _python_digest(folder: Path, pattern: str) -> str:
    files = sorted(folder.glob(pattern))
    parts = [f"{file.relative_to(folder)} {_sha(file.read_bytes())}" for file in files]
    return _sha("\n".join(parts))


def _sha(content: str | bytes) -> str:
    content = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(content).hexdigest()[:32]
