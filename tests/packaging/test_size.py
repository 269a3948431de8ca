"""The core stays small: a capability arrives as a plugin. A bound is raised only by the lines of
what several plugins need from the core, and lowered whenever the core shrinks."""

from pathlib import Path

CORE = Path(__file__).parents[2] / "core" / "src" / "rlhf"
LINES, FILES, ROOMS = 21_800, 148, 13


def test_the_core_stays_within_its_bounds() -> None:
    files = [*CORE.rglob("*.py")]
    rooms = {path.parent for path in CORE.glob("*/__init__.py")}
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert lines <= LINES
    assert len(files) <= FILES
    assert len(rooms) <= ROOMS
