"""The observers of a run: each is called separately, and one that raises is dropped."""

from __future__ import annotations

import copy
import functools
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pluggy

from rlhf.errors import first_line
from rlhf.hookspecs import ObserverHooks, RunRecord


class ObserverGateway(ObserverHooks):
    """The observers' hooks with their arguments as keywords; only rank 0 calls them.

    What an observer raises does not end the run: it is reported once, with its traceback in
    `errors/observer-NAME.txt` of the run folder, and this observer is not called again. They hear
    of the end of a run only if they have heard of its start.
    """

    def __init__(self, observers: Mapping[str, object]) -> None:
        self._started = False
        self._hooks = {name: hooks_of(observer) for name, observer in observers.items()}
        for hook in (name for name in vars(ObserverHooks) if not name.startswith("_")):
            setattr(self, hook, functools.partial(self._call, hook))

    def _call(self, hook: str, *, run: RunRecord, **arguments: Any) -> None:
        self._started |= hook == "on_start"
        if hook == "on_finish" and not self._started:
            return
        for name, hooks in list(self._hooks.items()):
            # What one observer changes, the run and the others must not see.
            copies = {
                key: copy.deepcopy(value)
                for key, value in arguments.items()
                if isinstance(value, (dict, list))
            }
            try:
                getattr(hooks, hook)(run=run, **arguments | copies)
            except Exception as error:  # An observer's own code may raise anything.
                del self._hooks[name]
                _report(name, hook, run.folder / "errors" / f"observer-{name}.txt", error)


def hooks_of(observer: object) -> Any:
    """Return the hooks of one observer, which take their arguments as keywords."""
    manager = pluggy.PluginManager("rlhf")
    manager.add_hookspecs(ObserverHooks)
    manager.register(observer)
    manager.check_pending()
    return manager.hook


def _report(name: str, hook: str, file: Path, error: Exception) -> None:
    text = _printable("".join(traceback.format_exception(error)))
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        where = f"see {file}"
    except OSError:
        where = f"its traceback:\n{text}"
    print(
        f"warning: observer {name!r} failed in {hook} and is not called again: "
        f"{type(error).__name__}: {_printable(first_line(error))}; {where}",
        file=sys.stderr,
        flush=True,
    )


def _printable(text: str) -> str:
    """Return the text with halves of surrogate pairs escaped, which no file can hold."""
    return text.encode(errors="backslashreplace").decode()
