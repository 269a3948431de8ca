"""A run whose ranks wait for one that has stopped explains itself."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import sft_runs


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_collective_that_times_out_says_which_rank_is_missing(
    inputs: sft_runs.Inputs, tmp_path: Path
) -> None:
    words = sft_runs.words(
        inputs, tmp_path / "run", "--train.steps", "500", "--nproc", "2",
        "--deepspeed.timeout", "0.15", "--data.workers", "0",
    )  # fmt: skip
    environment = os.environ | {"RLHF_CACHE": str(inputs.cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf", "run", "sft", *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    sft_runs.wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 2', process)
    (second,) = (child for child in children(process.pid) if rank_of(child) == "1")
    os.kill(second, signal.SIGSTOP)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    last = errors.strip().splitlines()[-1]
    # The second rank may have stopped in the phase in which the first one waits.
    places = "rank 1 has not entered the |every rank has entered the "
    assert re.match(rf"\[rank0\]: RuntimeError: ({places})", last), errors
    written = tmp_path / "run" / "errors" / "collectives-rank-0.json"
    assert last.endswith(f"; the last collectives of rank 0 are in {written}")
    assert '"gloo:' in written.read_text()


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((v.partition("=")[2] for v in variables if v.startswith("RANK=")), "")
