"""`rlhf plugins` from metadata alone, and `rlhf plugins check`, which loads everything."""

import json

import attrs

from rlhf.errors import RLHFError
from rlhf.registry.installed import Installed, demo_file, installed, load_object, load_record

COLUMNS = ("name", "kind", "distribution", "version", "summary")


def list_plugins(*, as_json: bool) -> int:
    """One line each; a problem stands where the summary would."""
    rows = installed()
    if as_json:
        hide = attrs.filters.exclude("value")
        print(json.dumps([attrs.asdict(row, filter=hide) for row in rows], indent=2))
        return 0
    table = [COLUMNS]
    for row in rows:
        remark = row.summary if row.problem is None else f"PROBLEM: {row.problem}"
        table.append((row.name, row.kind, row.distribution, row.version, remark))
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    for line in table:
        print("  ".join([*map(str.ljust, line[:4], widths), line[4]]).rstrip())
    return 0


def check_plugins() -> int:
    """Load the record, the import strings and the hooks of each; 2 if any is broken."""
    code = 0
    for plugin in installed():
        try:
            _check(plugin)
            print(f"ok      {plugin}")
        except Exception as error:  # A stranger's code may raise anything.
            kind = "" if isinstance(error, RLHFError) else f"{type(error).__name__}: "
            said = str(error).removeprefix(str(plugin)).lstrip(": ")
            print(f"broken  {plugin}: {kind}{said}")
            code = 2
    return code


def _check(plugin: Installed) -> None:
    from rlhf.registry.gateway import (  # late: start-up time
        CORE,
        check_backend,
        check_hooks,
        load_plugin,
    )

    if plugin.problem is not None:
        raise RLHFError(plugin.problem)
    if plugin.kind == "trainer":
        _check_trainer(plugin)
    elif plugin.kind == "backend":
        check_backend(load_plugin(plugin), defaults=load_object(CORE)())
    else:
        list(check_hooks(plugin.kind, load_plugin(plugin)))


def _check_trainer(plugin: Installed) -> None:
    record = load_record(plugin)
    trainer, base = load_object(record.trainer, plugin), load_object("rlhf.trainer:Trainer")
    if not (isinstance(trainer, type) and issubclass(trainer, base)):
        raise RLHFError(f"{record.trainer} is no subclass of rlhf.trainer.Trainer")
    if lacking := sorted(getattr(trainer, "__abstractmethods__", ())):
        raise RLHFError(f"{record.trainer} lacks {', '.join(lacking)}")
    if record.report is not None:
        load_object(record.report, plugin)
    if record.demo is not None and not (demo := demo_file(plugin, record)).is_file():
        raise RLHFError(f"its demo {demo} does not exist")
