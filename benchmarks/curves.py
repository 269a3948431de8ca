"""The loss curves of the six workflows beside those of the slow path, on the same rows and weights.

    python benchmarks/curves.py
    python benchmarks/curves.py dpo --shape 0.5b --dtype bf16 --steps 50 --pairs pairs.jsonl.gz

Takes what `workflows.py` takes; both sides of a workflow run at the same time. One table: the loss
of the first and the last step, and the largest and the mean difference of a step's loss.
"""

import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import workflows

SLOW = [str(Path(__file__).with_name("slow_path.py"))]
HEAD = """\
| workflow | first loss | last loss | of the slow path | largest difference | mean difference |
|---|---|---|---|---|---|"""


def main() -> int:
    options = workflows.parse()
    options.output.mkdir(parents=True, exist_ok=True)
    workflows.write_inputs(options)
    print(HEAD, flush=True)
    for workflow in options.workflows or workflows.SIZES:
        with ThreadPoolExecutor() as pool:
            fast, slow = pool.map(partial(one, options, workflow), ("fast", "slow"))
        print(line(workflow, fast, slow), flush=True)
    return 0


def one(options: Any, workflow: str, side: str) -> list[float]:
    """The losses of one run."""
    options = copy(options)
    options.output = options.output / side
    options.output.mkdir(exist_ok=True)
    options.program = SLOW if side == "slow" else options.program
    for name in ("model", "teacher", f"{workflow}.jsonl"):
        link, target = options.output / name, options.output.parent / name
        if target.exists() and not link.exists():
            link.symlink_to(target.resolve())
    found = workflows.ours(options, workflow)
    if len(found.get("losses", ())) < options.steps:
        sys.exit(f"{workflow}, {side}: {found.get('error', found['code'])}")
    losses: list[float] = found["losses"]
    return losses


def line(workflow: str, fast: list[float], slow: list[float]) -> str:
    apart = [abs(one - other) for one, other in zip(fast, slow, strict=True)]
    numbers = [f"{value:.4f}" for value in (fast[0], fast[-1], slow[-1])]
    numbers += [f"{value:.1e}" for value in (max(apart), statistics.mean(apart))]
    return f"| {workflow} | {' | '.join(numbers)} |"


if __name__ == "__main__":
    sys.exit(main())
