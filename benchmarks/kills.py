"""Kill runs with SIGKILL at random moments, resume them, and compare them with runs that were not
killed.

    python benchmarks/kills.py --kills 200 --jobs 2

Seven workflows, four ZeRO stages, one or two ranks, a checkpoint every second step, an evaluation
every third. All processes are forks of one with the imports done, so that kills fall on what a run
does. A kill hits all processes of a run or one of its ranks, at a moment that `--seed`
draws: while it starts, in a step, in a save, at the end. Every run is killed once or twice and then
resumed to its end. It fails if a resume ends with an error, starts before the last checkpoint, says
more than one line about it, or if any metric or weight differs by a bit. One line per run says what
was hit.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen
from bits import GRPO, KD, TRAINERS, Record, first_difference, metrics, weights, write_inputs

from rlhf_devkit.forked import Forked

STAGES = {
    "stage 0": "--deepspeed.stage 0",
    "stage 1": "--nproc 2 --deepspeed.stage 1",
    "stage 2": "--nproc 2 --deepspeed.stage 2",
    "stage 3": "--nproc 2 --deepspeed.stage 3 --deepspeed.persistence_threshold 0",
}
STEPS = 7
MORE = {"kd": KD, "grpo": GRPO}
"""Words that a workflow needs."""
CADENCE = ["--checkpoint.every", "2", "--train.eval_every", "3"]


@frozen
class Case:
    """A workflow at a stage."""

    trainer: str
    stage: str

    def words(self, folder: Path) -> list[str]:
        """The words after `rlhf run`."""
        more = shlex.split(f"{STAGES[self.stage]} {MORE.get(self.trainer, '')}")
        return [self.trainer, "short.yaml", *more, *CADENCE, "--output", str(folder)]


@frozen
class Whole:
    """What a run that is not killed computes and prints, and how long it takes."""

    record: Record
    seconds: float
    openings: set[str]
    """The first words of its lines."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=24, help="runs that are killed")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", choices=TRAINERS, help="one workflow")
    options = parser.parse_args()
    trainers = [options.only] if options.only else TRAINERS
    cases = [Case(trainer, stage) for stage in STAGES for trainer in trainers]
    numbers = range(options.first, options.first + options.kills)
    failed = 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        place = Path(name)
        write_inputs(place)
        needed = {cases[number % len(cases)] for number in numbers}
        expected = {case: pool.submit(whole, place, case) for case in cases if case in needed}

        def attempt(number: int) -> tuple[list[str], str]:
            case = cases[number % len(cases)]
            return kill(place, number, case, expected[case].result(), options.seed)

        for number, (hits, failure) in zip(numbers, pool.map(attempt, numbers), strict=True):
            case = cases[number % len(cases)]
            failed += bool(failure)
            print(
                f"{number}  {case.trainer}, {case.stage}: {'; '.join(hits)}: {failure or 'ok'}",
                flush=True,
            )
    print(f"{options.kills} runs were killed; {failed} of them failed")
    return int(bool(failed))


def start(place: Path, case: Case, folder: Path, *more: str) -> Forked:
    environment = os.environ | {"RLHF_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    words = ["-m", "rlhf", "run", *case.words(folder), *more]
    return Forked(*words, environment=environment, folder=place)


def whole(place: Path, case: Case) -> Whole:
    """Run a case without a kill."""
    folder = place / f"{case.trainer} {case.stage}"
    begin = time.monotonic()
    process = start(place, case, folder)
    output = "".join(process.communicate())
    if process.returncode:
        raise SystemExit(f"{case} fails without a kill\n{output}")
    return Whole(computed(folder), time.monotonic() - begin, openings(output))


def computed(folder: Path) -> Record:
    return {"metrics": metrics(folder), "weights": weights(folder / "model")}


def openings(output: str) -> set[str]:
    return {line.split()[0] for line in output.splitlines() if line.strip()}


def kill(place: Path, number: int, case: Case, expected: Whole, seed: int) -> tuple[list[str], str]:
    """Kill a run once or twice and resume it; return what was hit, and what went wrong or ""."""
    draw = random.Random(1000 * seed + number)
    folder = place / f"kill-{number}"
    hits = []
    for attempt in range(draw.choice((1, 1, 2))):
        process = start(place, case, folder, *["--resume"] * bool(attempt))
        hits.append(strike(process, folder, draw, expected.seconds))
    last = last_checkpoint(folder)
    process = start(place, case, folder, "--resume")
    output = "".join(process.communicate())
    if process.returncode:
        return hits, f"the resumed run ends with {process.returncode}\n{output}"
    # A resumed run prints what the whole run prints, and one line about where it continues.
    about = [line for line in output.splitlines() if openings(line) - expected.openings]
    begun = f"step-{last:06d}" if last else "no checkpoint"
    if len(about) != 1 or (begun not in about[0] and "nothing left" not in about[0]):
        return hits, f"{begun} was there, but the resumed run says {about}"
    difference = first_difference(expected.record, computed(folder))
    shutil.rmtree(folder)
    return hits, difference


def strike(process: Forked, folder: Path, draw: random.Random, long: float) -> str:
    """Send SIGKILL to all processes of the run or to one of its ranks; return what was hit.

    The moment is drawn from the time `long` that a whole run takes, or from the 0.1 seconds after a
    drawn step.
    """
    step = draw.choice((0, draw.randrange(1, STEPS + 1)))
    moment = draw.uniform(0.0, 0.1 if step else long)
    while process.poll() is None and logged(folder) < step:
        time.sleep(0.01)
    end = time.monotonic() + moment
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    hit = "had ended"
    if process.poll() is None:
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        hit = f"after step {logged(folder)}"
        if ranks and draw.random() < 0.5:
            os.kill(int(draw.choice(ranks)), signal.SIGKILL)
            hit += ", one rank"
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return hit


def logged(folder: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return max((int(json.loads(line)["step"]) for line in lines), default=0)
    except (OSError, ValueError):
        return 0


def last_checkpoint(folder: Path) -> int:
    """The step of the newest complete checkpoint, or 0."""
    found = (folder / "checkpoints").glob("step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


if __name__ == "__main__":
    sys.exit(main())
