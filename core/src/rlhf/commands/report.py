"""`rlhf report`: one HTML page about runs."""

from collections.abc import Sequence
from pathlib import Path

from rlhf.folder.disk import writing
from rlhf.report.page import page
from rlhf.report.recorded import read_run


def report_command(runs: Sequence[str], output: str) -> int:
    """Write one HTML page about the folders `runs`; returns 0."""
    text, path = page([read_run(Path(folder)) for folder in runs]), Path(output)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"wrote {output}")
    return 0
