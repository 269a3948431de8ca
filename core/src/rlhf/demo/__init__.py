"""The embedded demo: rows made by rule and a small base model that this project trained.

For the demos and tests of trainers.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.demo import arithmetic
from rlhf.demo.arithmetic import Problem, problems
from rlhf.demo.report import LOG_RATIOS, print_before_and_after
from rlhf.errors import RLHFError
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find

__all__ = [
    "LOG_RATIOS", "Problem", "base_model_folder", "print_before_and_after", "problems", "rows",
]  # fmt: skip

Maker = Callable[[Problem, random.Random], dict[str, Any]]

FORMATS: dict[str, Maker] = {
    "demonstration": arithmetic.demonstration,
    "preference": arithmetic.preference,
    "unpaired": arithmetic.unpaired,
}
"""What makes rows of core's formats; other formats bring their own."""


def rows(name: str, split: str, format: str) -> list[dict[str, Any]]:
    """Return the rows of `demo:arithmetic` in a trainer's row format, of `demo:ranked` (four
    answers each) or of `demo:equations` (plain text)."""
    if split not in arithmetic.SIZES:
        raise RLHFError(f"demo:{name} has no split {split!r}; available: eval, train")
    if name == "equations":
        return [{"text": text} for text in arithmetic.equations(split)]
    if name == "ranked" and format == "preference":
        draw = random.Random(f"ranked {split}")
        return [arithmetic.ranked(problem, draw) for problem in arithmetic.problems(split)]
    if format == "raw":
        raise RLHFError(
            f"demo:{name} has no rows for a trainer without a row_format; give data.train files of "
            "your own (in tests: rows)"
        )
    if name != "arithmetic":
        raise RLHFError(f"demo:{name} has no {format} rows; use demo:arithmetic")
    make, draw = FORMATS.get(format) or _maker(format), random.Random(f"{format} {split}")
    return [make(problem, draw) for problem in arithmetic.problems(split)]


def _maker(format: str) -> Maker:
    """Return what makes rows of a plugin's format."""
    plugin = find("format", format)
    path = load_record(plugin).demo
    if path is None:
        raise RLHFError(f"{plugin} has no demo rows; give data.train files of your own")
    maker: Maker = load_object(path, plugin)
    return maker


def base_model_folder() -> Path:
    """Return the folder of the base model `demo:base`: a Llama of 0.4 M parameters that has seen
    nothing but equations."""
    return Path(__file__).parent / "base"
