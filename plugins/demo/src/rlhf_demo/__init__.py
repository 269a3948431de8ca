"""Rows made by rule, and a small base model that this project trained.

For the demos and tests of trainers.
"""

import pickle
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import RLHFError
from rlhf_demo import arithmetic
from rlhf_demo.arithmetic import Problem, problems
from rlhf_demo.report import LOG_RATIOS, print_before_and_after

__all__ = [
    "LOG_RATIOS", "Problem", "base_model_folder", "print_before_and_after", "problems", "rows",
]  # fmt: skip

Maker = Callable[[Problem, random.Random], dict[str, Any]]

FORMATS: dict[str, Maker] = {
    "demonstration": arithmetic.demonstration,
    "preference": arithmetic.preference,
    "prompt": arithmetic.prompt,
    "unpaired": arithmetic.unpaired,
}
"""What makes rows of the formats of rlhf-rows; other formats bring their own."""


def rows(name: str, split: str, format: str) -> list[dict[str, Any]]:
    """Return the rows of `demo:arithmetic` in a trainer's row format, of `demo:ranked` (four
    answers each), of `demo:sums` (prompts that the base model continues) or of `demo:equations`
    (plain text)."""
    found: list[dict[str, Any]] = pickle.loads(_pickled(name, split, format))
    return found


@cache  # The digest of a run's rows needs them before their reader does.
def _pickled(name: str, split: str, format: str) -> bytes:
    """Return `rows`, which their caller may change."""
    return pickle.dumps(_made(name, split, format))


def _made(name: str, split: str, format: str) -> list[dict[str, Any]]:
    if split not in arithmetic.SIZES:
        raise RLHFError(f"demo:{name} has no split {split!r}; available: eval, train")
    if name == "equations":
        return [{"text": text} for text in arithmetic.equations(split)]
    if name == "sums" and format == "prompt":
        return [*arithmetic.sums(split)]
    if name == "ranked" and format == "preference":
        draw = random.Random(f"ranked {split}")
        return [arithmetic.ranked(problem, draw) for problem in arithmetic.problems(split)]
    if format == "raw":
        raise RLHFError(
            f"demo:{name} has no rows for a trainer without a row_format; give data.train files of "
            "your own (in tests: rows)"
        )
    make, draw = FORMATS.get(format) or _maker(format), random.Random(f"{format} {split}")
    if name != "arithmetic":
        raise RLHFError(f"demo:{name} has no {format} rows; use demo:arithmetic")
    return [make(problem, draw) for problem in arithmetic.problems(split)]


def _maker(format: str) -> Maker:
    from rlhf.formats import demo_maker  # late: start-up time

    return demo_maker(format)


def base_model_folder() -> Path:
    """Return the folder of the base model `demo:base`: a Llama of 0.4 M parameters that has seen
    nothing but equations."""
    return Path(__file__).parent / "base"
