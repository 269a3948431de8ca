"""What distributions add to the model folders of runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.errors import RLHFError
from rlhf.registry.imports import complete_export

NOTES = """
    from rlhf.plugin import ExportPlugin

    plugin = ExportPlugin(write="notes:write")

    def write(folder, run, *, role, until):
        (folder / "notes.txt").write_text(f"{run.name} {role} {until}")
"""


def test_every_distribution_adds_its_files(install: Callable[..., Path], tmp_path: Path) -> None:
    complete_export(tmp_path, Path("run"))
    assert not (tmp_path / "notes.txt").exists()
    install("rlhf-notes", {"exports": {"notes": "notes:plugin"}}, {"notes": NOTES})
    complete_export(tmp_path, Path("run"))
    assert (tmp_path / "notes.txt").read_text() == "run policy inf"
    complete_export(tmp_path, Path("run"), role="critic", until=3)
    assert (tmp_path / "notes.txt").read_text() == "run critic 3"


def test_a_function_that_does_not_exist_is_named(
    install: Callable[..., Path], tmp_path: Path
) -> None:
    source = NOTES.replace("def write", "def other")
    install("rlhf-notes", {"exports": {"notes": "notes:plugin"}}, {"notes": source})
    with pytest.raises(RLHFError) as error:
        complete_export(tmp_path, Path("run"))
    assert str(error.value) == (
        "export 'notes' of rlhf-notes 1.0: no 'write' in notes; correct write="
    )
