"""`rlhf report`: one HTML page about runs."""

from collections.abc import Sequence
from pathlib import Path

from rlhf.cli import write_file
from rlhf_tools.page import page
from rlhf_tools.recorded import read_run


def report_command(runs: Sequence[str], output: str) -> int:
    """Write one HTML page about the folders `runs`; returns 0."""
    write_file(Path(output), page([read_run(Path(folder)) for folder in runs]), replace=True)
    print(f"wrote {output}")
    return 0
