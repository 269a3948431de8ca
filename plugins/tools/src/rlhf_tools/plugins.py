"""`rlhf plugins` lists plugins from metadata only; `rlhf plugins check` loads each of them."""

import json
from argparse import ArgumentParser
from typing import Any

import attrs

from rlhf.cli import NotInstalled, find_backend, installed
from rlhf.errors import RLHFError
from rlhf_tools.table import print_table

COLUMNS = ("name", "kind", "distribution", "version", "summary")
IMPORTS = {
    "command": ("run",),
    "export": ("write",),
    "format": ("demo",),
    "media": ("reader", "values"),
    "trainer": ("report",),
}
"""The import strings of a record that may name anything, by the kind of plugin."""


def plugins_command(*, check: str | None, as_json: bool) -> int:
    """Print one line per plugin, with its problem instead of its summary if it has one; with
    `check`, load each of them. Returns the exit code."""
    if check:
        return check_plugins()
    rows = installed()
    if as_json:
        hide = attrs.filters.exclude("value")
        print(json.dumps([attrs.asdict(row, filter=hide) for row in rows], indent=2))
        return 0
    remarks = [f"PROBLEM: {row.problem}" if row.problem else row.summary for row in rows]
    cells = [(row.name, row.kind, row.distribution, row.version) for row in rows]
    print_table([COLUMNS, *((*cell, remark) for cell, remark in zip(cells, remarks, strict=True))])
    return 0


def check_plugins() -> int:
    """Load the record, import strings and hooks of each plugin; returns 2 if one is broken.

    A plugin that lacks a distribution is not usable, but not broken.
    """
    code = 0
    for plugin in installed():
        state, problem = "ok", ""
        try:
            _check(plugin)
        except Exception as error:  # A plugin's code may raise anything.
            state = "not usable" if isinstance(error, NotInstalled) else "broken"
            code = code if state == "not usable" else 2
            kind = "" if isinstance(error, RLHFError) else f"{type(error).__name__}: "
            problem = f": {kind}{str(error).removeprefix(str(plugin)).lstrip(': ')}"
        print(f"{state:<10}  {plugin}{problem}")
    return code


def _check(plugin: Any) -> None:
    from rlhf import preview  # late: start-up time

    if plugin.problem is not None:
        raise RLHFError(plugin.problem)
    record = preview.load_record(plugin)
    if plugin.kind == "trainer":
        _check_trainer(plugin)
    elif plugin.kind == "backend":
        preview.check_backend(preview.load_backend(plugin))
    elif plugin.kind in ("extension", "observer"):
        preview.hooks_class(plugin)
    elif plugin.kind == "format":
        preview.load_format(plugin.name)
    elif plugin.kind == "kernels":
        preview.load_kernels(plugin)
    elif plugin.kind == "rollouts":
        from rlhf.rollouts import load_engine

        load_engine(plugin)
    elif plugin.kind == "command":
        record.arguments(ArgumentParser())
    for name in IMPORTS.get(plugin.kind, ()):
        if path := getattr(record, name):
            preview.load_object(path, plugin)


def _check_trainer(plugin: Any) -> None:
    from rlhf import preview  # late: start-up time

    record = preview.load_record(plugin)
    trainer = preview.load_object(record.trainer, plugin)
    preview.check_trainer(trainer, record.trainer)
    if trainer.row_format is not None:
        preview.load_format(trainer.row_format)
    if record.demo is not None and not (demo := preview.demo_file(plugin, record)).is_file():
        raise RLHFError(f"its demo {demo} does not exist")
    name = next((row.name for row in installed() if row.kind == "backend"), None)
    backend = find_backend(name)
    settings = preview.load_record(backend).config
    sections = preview.config_class(plugin.name, record.config, backend.name, settings)
    preview.trainer_defaults(sections, plugin, record)
