"""The cache of tokenised rows: found by content, written once per host, without a collective."""

import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from rlhf.folder.disk import writing

POLL_SECONDS = 0.2
OURS = (
    *("chat", "convert", "encode", "files", "formats", "mapping", "packing"),
    *("preference", "rows", "stepwise", "tokenise", "trees", "unpaired"),
)
"""Our own modules whose source decides what the cache holds."""


def cache_root() -> Path:
    """`$RLHF_CACHE`, or `~/.cache/rlhf`."""
    return Path(os.environ.get("RLHF_CACHE") or "~/.cache/rlhf").expanduser()


def once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(temporary folder)` unless it is there.

    Whoever gets the lock builds; the others look for the folder until it is there, or until the
    lock is free because the builder died. The folder is complete or absent.
    """
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        while not folder.exists():
            with _lock(folder.with_suffix(".lock")) as ours:
                if ours and not folder.exists():
                    _build(folder, build)
                elif not ours:
                    time.sleep(POLL_SECONDS)
    return folder


def key(trainer: Any, tokenizer: Any, **parts: Any) -> str:
    """A digest of everything that decides what a row becomes: tokenizer and template, the trainer's
    section and source, our own source and version, and `parts`."""
    own = {
        "parts": parts,
        "tokenizer": _tokenizer_digest(tokenizer),
        "section": attrs.asdict(trainer.config) if attrs.has(type(trainer.config)) else None,
        "trainer": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(trainer).__mro__],
        "sources": _sources(trainer),
        "version": _version(),
    }
    return _sha(json.dumps(own, sort_keys=True, default=repr))


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        build(part)
        part.rename(folder)
    except OSError:
        # Another host wrote the same to a shared folder; locks do not reach across all file
        # systems.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether we hold the lock; the system frees it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _tokenizer_digest(tokenizer: Any) -> str:
    if tokenizer.is_fast:
        # Padding and truncation are set by every call and mean nothing here.
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
    modules = {kind.__module__ for kind in type(trainer).__mro__} - {"builtins", "abc"}
    modules |= {f"rlhf.data.{name}" for name in OURS}
    return [_sha(_source(name)) for name in sorted(modules)]


def _source(name: str) -> str:
    module = sys.modules.get(name)
    try:
        return inspect.getsource(module) if module is not None else name
    except (OSError, TypeError):
        return name


def _version() -> str:
    try:
        return metadata.version("rlhf-core")
    except metadata.PackageNotFoundError:
        return ""


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
