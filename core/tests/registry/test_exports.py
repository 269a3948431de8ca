"""What distributions add to the model folders of runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("own", "broken", "problem"),
    [
        (
            "def write", "def other",
            "export 'notes' of rlhf-notes 1.0: no 'write' in notes; correct write=",
        ),
        ("from rlhf", "import absent_library\n    from rlhf", "absent_library"),
        ("{until}", "{1 // 0}", "integer division or modulo by zero"),
    ],
)  # fmt: skip
def test_one_that_is_broken_costs_nobody_the_model(
    own: str,
    broken: str,
    problem: str,
    install: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = NOTES.replace(own, broken)
    assert source != NOTES
    install("rlhf-notes", {"exports": {"notes": "notes:plugin"}}, {"notes": source})
    install(
        "rlhf-more", {"exports": {"more": "more:plugin"}}, {"more": NOTES.replace("notes", "more")}
    )
    complete_export(tmp_path, Path("run"))
    printed = capsys.readouterr().out
    assert printed.startswith(
        "warning: the export 'notes' of rlhf-notes 1.0 has not added its files: "
    )
    assert problem in printed
    assert printed.count("\n") == 1
    assert (tmp_path / "more.txt").read_text() == "run policy inf"
