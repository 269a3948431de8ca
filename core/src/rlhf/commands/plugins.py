"""`rlhf plugins` lists plugins from metadata only; `rlhf plugins check` loads each of them."""

import json
from argparse import ArgumentParser

import attrs

from rlhf.commands.table import print_table
from rlhf.errors import RLHFError
from rlhf.plugin import CommandPlugin
from rlhf.registry.installed import Installed, NotInstalled, find_backend, installed

COLUMNS = ("name", "kind", "distribution", "version", "summary")


def add_arguments(parser: ArgumentParser) -> None:
    """Add `check` and the option for JSON."""
    text = "load each plugin; exit 2 if one is broken"
    parser.add_argument("check", nargs="?", choices=["check"], help=text)
    text = "print the list as JSON"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


plugin = CommandPlugin(
    help="list installed plugins without importing them",
    run="rlhf.commands.plugins:plugins_command",
    arguments=add_arguments,
)


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


def _check(plugin: Installed) -> None:
    # late: start-up time
    from rlhf.registry import gateway
    from rlhf.registry.imports import load_object, load_record

    if plugin.problem is not None:
        raise RLHFError(plugin.problem)
    if plugin.kind == "trainer":
        _check_trainer(plugin)
    elif plugin.kind == "backend":
        gateway.check_backend(gateway.load_backend(plugin))
    elif plugin.kind in ("extension", "observer"):
        gateway.hooks_class(plugin)
    elif plugin.kind == "format":
        record = load_record(plugin)
        for path in filter(None, (record.read, record.demo)):
            load_object(path, plugin)
    elif plugin.kind == "demo":
        load_record(plugin)
    elif plugin.kind == "export":
        load_object(load_record(plugin).write, plugin)
    elif plugin.kind == "kernels":
        from rlhf.model.accelerated import load_kernels  # late: start-up time

        load_kernels(plugin)
    elif plugin.kind == "media":
        record = load_record(plugin)
        for path in (record.reader, record.values):
            load_object(path, plugin)
    elif plugin.kind == "rollouts":
        from rlhf.rollouts import load_engine  # late: start-up time

        load_engine(plugin)
    elif plugin.kind == "command":
        _check_command(plugin)


def _check_command(plugin: Installed) -> None:
    from rlhf.registry.imports import load_object, load_record  # late: start-up time

    record = load_record(plugin)
    record.arguments(ArgumentParser())
    load_object(record.run, plugin)


def _check_trainer(plugin: Installed) -> None:
    # late: start-up time
    from rlhf.registry.imports import check_trainer, demo_file, load_object, load_record
    from rlhf.request.reader import config_class, trainer_defaults

    record = load_record(plugin)
    check_trainer(load_object(record.trainer, plugin), record.trainer)
    if record.report is not None:
        load_object(record.report, plugin)
    if record.demo is not None and not (demo := demo_file(plugin, record)).is_file():
        raise RLHFError(f"its demo {demo} does not exist")
    backend = find_backend(next((row.name for row in installed() if row.kind == "backend"), None))
    sections = config_class(plugin.name, record.config, backend.name, load_record(backend).config)
    trainer_defaults(sections, plugin, record)
