"""`rlhf migrate`: a configuration of TRL, Axolotl, LLaMA-Factory or OpenRLHF as one of ours."""

import sys
import tempfile
from pathlib import Path

from rlhf import read_config
from rlhf.cli import NotInstalled, write_file
from rlhf.errors import RLHFError
from rlhf_migrate.arguments import read_arguments
from rlhf_migrate.as_yaml import page
from rlhf_migrate.rules import Migration
from rlhf_migrate.translate import translate


def migrate_command(
    source: str, *, output: str | None, chosen: str | None, gpus: int | None
) -> int:
    """Write the YAML to a file or to standard output, and tell on standard error what it is;
    returns 0."""
    path = Path(source)
    migration = translate(read_arguments(path, chosen), folder=path.parent, devices=gpus)
    text = page(migration, path.name)
    if output is None:
        print(text, end="")
    else:
        write_file(Path(output), text)
    print(f"{path} is {migration.title}: {_check(migration, text)}", file=sys.stderr)
    return 0


def _check(migration: Migration, text: str) -> str:
    """Return what our own reader says of the file, or which keys have no value."""
    trainer = migration.trainer
    if migration.incomplete:
        return f"to be completed, because these have no value: {', '.join(migration.incomplete)}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "migrated.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            read_config(trainer, file=file)
        except NotInstalled as error:
            return f"not checked, because {error}"
        except RLHFError as error:
            return f"to be completed, because {error}"
    return f"`rlhf run {trainer}` accepts it; `rlhf inspect {trainer}` shows its rows"
