"""The core stays small: a capability arrives as a plugin. A bound is raised only by the lines of
what several plugins need from the core, and lowered whenever the core shrinks. Its functions stay
short. The largest plugin, DeepSpeed's, has a bound, too."""

import ast
from collections.abc import Iterable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
CORE, DEEPSPEED = ROOT / "core" / "src" / "rlhf", ROOT / "plugins" / "deepspeed" / "src"
LINES, FILES, ROOMS = 21_800, 148, 13
DEEPSPEED_LINES = 4_500
MEDIAN, LONG, SHARE_BELOW = 8, 20, 0.9


def test_the_core_stays_within_its_bounds() -> None:
    files = [*CORE.rglob("*.py")]
    rooms = {path.parent for path in CORE.glob("*/__init__.py")}
    assert lines_of(files) <= LINES
    assert len(files) <= FILES
    assert len(rooms) <= ROOMS


def test_the_deepspeed_plugin_stays_within_its_bound() -> None:
    assert lines_of(DEEPSPEED.rglob("*.py")) <= DEEPSPEED_LINES


def test_functions_of_the_core_are_short() -> None:
    sizes = [size for path in CORE.rglob("*.py") for size in lengths(path.read_text("utf-8"))]
    assert median(sizes) <= MEDIAN
    assert sum(size < LONG for size in sizes) >= SHARE_BELOW * len(sizes)


def lines_of(files: Iterable[Path]) -> int:
    """Return the number of lines of all files together."""
    return sum(path.read_bytes().count(b"\n") for path in files)


def lengths(source: str) -> list[int]:
    """Return the lines of each function, with its docstring and without its decorators. Functions
    in functions and methods count, too."""
    return [
        node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
