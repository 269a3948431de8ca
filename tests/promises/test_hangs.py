"""A run whose ranks wait for one that has stopped explains itself."""

import os
import re
import signal
import time
from pathlib import Path

import sft_runs
from rlhf_devkit.forked import Forked


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_collective_that_times_out_says_which_rank_is_missing(
    inputs: sft_runs.Inputs, tmp_path: Path
) -> None:
    words = sft_runs.words(
        inputs, tmp_path / "run", "--train.steps", "500", "--nproc", "2",
        "--deepspeed.timeout", "0.1", "--data.workers", "0",
    )  # fmt: skip
    environment = os.environ | {"RLHF_CACHE": str(inputs.cache), "OMP_NUM_THREADS": "1"}
    process = Forked("-m", "rlhf", "run", "sft", *words, environment=environment)
    sft_runs.wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 2', process)
    _, second = children(process.pid)  # In the order of their starts.
    os.kill(second, signal.SIGSTOP)
    deadline = time.monotonic() + 120
    while len(children(process.pid)) == 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # The launcher would wait for it.
    os.kill(second, signal.SIGCONT)
    _, errors = process.communicate()
    assert process.returncode == 1, errors
    last = [line for line in errors.splitlines() if line.startswith("[rank0]: ")][-1]
    # The second rank may have stopped in the phase in which the first one waits.
    places = "rank 1 has not entered the |every rank has entered the "
    assert re.match(rf"\[rank0\]: RuntimeError: ({places})", last), errors
    written = tmp_path / "run" / "errors" / "collectives-rank-0.json"
    assert last.endswith(f"; the last collectives of rank 0 are in {written}")
    assert '"gloo:' in written.read_text()
