"""Kill runs with SIGKILL at random moments, resume them, and compare them with runs that were not
killed.

    python benchmarks/kills.py --kills 200 --jobs 2

Six workflows, four ZeRO stages and offload, one or two ranks, a checkpoint every second step, an
evaluation every third. A kill hits all processes of a run or one of its ranks, at a moment that
`--seed` draws: while it starts, in a step, in a save, at the end. Every run is killed once, often
twice, and then resumed to its end. A kill fails if a resume ends with an error, starts before the
last checkpoint, says more than one line about it, or if any metric or weight differs by a bit.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen
from bits import KD, SHORT, TRAINERS, first_difference, metrics, weights

STAGES = {
    "stage 0": "--deepspeed.stage 0",
    "stage 1": "--nproc 2 --deepspeed.stage 1",
    "stage 2": "--nproc 2 --deepspeed.stage 2",
    "stage 3": "--nproc 2 --deepspeed.stage 3 --deepspeed.persistence_threshold 0",
}
STEPS = 7
CADENCE = ["--checkpoint.every", "2", "--train.eval_every", "3"]


@frozen
class Case:
    """A workflow at a stage."""

    trainer: str
    stage: str

    def words(self, folder: Path) -> list[str]:
        """The words after `rlhf run`."""
        more = shlex.split(f"{STAGES[self.stage]} {KD if self.trainer == 'kd' else ''}")
        return [self.trainer, "short.yaml", *more, *CADENCE, "--output", str(folder)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    cases = [Case(trainer, stage) for stage in STAGES for trainer in TRAINERS]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        place = Path(name)
        (place / "short.yaml").write_text(SHORT)
        shares = [cases[number % len(cases)] for number in range(options.kills)]
        used = list(dict.fromkeys(shares))
        expected = dict(zip(used, pool.map(lambda case: whole(place, case), used), strict=True))
        results = pool.map(
            lambda number: kill(place, number, shares[number], expected, options.seed),
            range(options.kills),
        )
        failed = [result for result in results if result is not None]
    for line in failed:
        print(line)
    print(f"{options.kills} runs were killed; {len(failed)} of them failed")
    return int(bool(failed))


def start(place: Path, case: Case, folder: Path, *more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"RLHF_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf", "run", *case.words(folder), *more],
        cwd=place, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def whole(place: Path, case: Case) -> dict[str, object]:
    """What a run that is not killed computes."""
    folder = place / f"{case.trainer} {case.stage}"
    process = start(place, case, folder)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{case} fails without a kill\n{output}")
    return {"metrics": metrics(folder), "weights": weights(folder / "model")}


def kill(
    place: Path, number: int, case: Case, expected: dict[Case, dict[str, object]], seed: int
) -> str | None:
    """Kill a run once or twice and resume it; returns what went wrong."""
    draw = random.Random(1000 * seed + number)
    folder = place / f"kill-{number}"
    for attempt in range(draw.choice((1, 1, 2))):
        strike(start(place, case, folder, *["--resume"] * bool(attempt)), folder, draw)
    last = last_checkpoint(folder)
    process = start(place, case, folder, "--resume")
    output, _ = process.communicate()
    name = f"kill {number} of {case.trainer}, {case.stage}"
    if process.returncode:
        return f"{name}: the resumed run ends with {process.returncode}\n{output}"
    about = [line for line in output.splitlines() if line.startswith(("resumed", "nothing left"))]
    begun = f"step-{last:06d}" if last else "no checkpoint"
    if len(about) != 1 or (begun not in about[0] and "nothing left" not in about[0]):
        return f"{name}: {begun} was there, but the resumed run says {about}"
    found = {"metrics": metrics(folder), "weights": weights(folder / "model")}
    difference = first_difference(expected[case], found)
    return f"{name}: {difference}" if difference else None


def strike(process: subprocess.Popen[str], folder: Path, draw: random.Random) -> None:
    """Send SIGKILL to all processes of the run or to one of its ranks, after a drawn step."""
    step, moment = draw.randrange(STEPS + 1), draw.uniform(0.0, 0.4)
    while process.poll() is None and logged(folder) < step:
        time.sleep(0.01)
    time.sleep(moment)
    if process.poll() is None:
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if ranks and draw.random() < 0.5:
            os.kill(int(draw.choice(ranks)), signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


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
