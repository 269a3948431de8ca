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

__all__ = [
    "LOG_RATIOS", "Problem", "base_model_folder", "print_before_and_after", "problems", "rows",
]  # fmt: skip

FORMATS: dict[str, Callable[[arithmetic.Problem, random.Random], dict[str, Any]]] = {
    "demonstration": arithmetic.demonstration,
    "preference": arithmetic.preference,
    "unpaired": arithmetic.unpaired,
    "stepwise": arithmetic.stepwise,
}


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
    if name != "arithmetic" or format not in FORMATS:
        raise RLHFError(f"demo:{name} has no {format} rows; use demo:arithmetic")
    draw = random.Random(f"{format} {split}")
    return [FORMATS[format](problem, draw) for problem in arithmetic.problems(split)]


def base_model_folder() -> Path:
    """Return the folder of the base model `demo:base`: a Llama of 0.4 M parameters that has seen
    nothing but equations."""
    return Path(__file__).parent / "base"
