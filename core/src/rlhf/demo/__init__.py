"""The embedded demo: rows made by rule and a small base model that this project trained.

For the demos and tests of trainers.
"""

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.config.source_names import DEMO
from rlhf.demo import arithmetic
from rlhf.demo.arithmetic import Problem, problems
from rlhf.errors import RLHFError
from rlhf.folder.run_folder import logged
from rlhf.registry.imports import demo_plugin, load_object, load_record
from rlhf.registry.installed import find

__all__ = [
    "LOG_RATIOS", "Problem", "base_model_folder", "model_folder", "print_before_and_after",
    "problems", "rows",
]  # fmt: skip

Maker = Callable[[Problem, random.Random], dict[str, Any]]

FORMATS: dict[str, Maker] = {
    "demonstration": arithmetic.demonstration,
    "preference": arithmetic.preference,
    "prompt": arithmetic.prompt,
    "unpaired": arithmetic.unpaired,
}
"""What makes rows of core's formats; other formats bring their own."""


@cache  # The digest of a run's rows needs them before their reader does.
def rows(name: str, split: str, format: str) -> list[dict[str, Any]]:
    """Return the rows of `demo:arithmetic` in a trainer's row format, of `demo:ranked` (four
    answers each), of `demo:sums` (prompts that the base model continues) or of `demo:equations`
    (plain text), or of the demo of a plugin. The list is the same at every call."""
    if demo := demo_plugin(name):
        return demo.rows(split, format)
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
    return load_object(path, plugin)


def base_model_folder() -> Path:
    """Return the folder of the base model `demo:base`: a Llama of 0.4 M parameters that has seen
    nothing but equations."""
    return Path(__file__).parent / "base"


def model_folder(path: str) -> Path:
    """Return the folder of the model `demo:NAME`, core's or that of a plugin."""
    demo = demo_plugin(path.removeprefix(DEMO))
    return demo.model_folder() if demo else base_model_folder()


LOG_RATIOS = {
    "rewards/margins": ("reward margin, right - wrong", "8.3f"),
    "logps/chosen": ("log-probability, right", "8.1f"),
    "logps/rejected": ("log-probability, wrong", "8.1f"),
    "loss": ("loss", "8.3f"),
}
"""Metrics of trainers whose reward is beta times an answer's log-ratio to the reference, which is 0
at the start."""


def print_before_and_after(folder: Path, title: str, shown: Mapping[str, tuple[str, str]]) -> None:
    """Print under `title` a line for each of `shown`, {metric: (what it is, format)}, of the run in
    `folder`. Metrics are named without `eval/`. Prints nothing if metrics.jsonl has no evaluation
    of step 0."""
    names = [f"eval/{name}" for name in shown]
    evaluations = [
        record
        for record in logged(folder)
        if all(isinstance(record.get(name), int | float) for name in names)
    ]
    if not evaluations or evaluations[0]["step"] > 0:
        return
    before, after = evaluations[0], evaluations[-1]
    width = max(len(title), *(len(text) for text, _ in shown.values()))
    print(f"\n{title:{width}}   before    after")
    for name, (text, shape) in shown.items():
        old, new = before[f"eval/{name}"], after[f"eval/{name}"]
        print(f"{text:{width}} {old:{shape}} {new:{shape}}")
