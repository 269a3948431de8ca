"""The smallest inputs of an SFT run, its command line, and the run as a function for ranks."""

import io
import json
import os
import subprocess
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf_demo import rows
from rlhf_devkit import make_model, write_rows


@frozen
class Inputs:
    """Where the model and the rows are."""

    model: Path
    train: Path
    eval: Path
    cache: Path


def make(folder: Path) -> Inputs:
    """Write a Llama of two layers with random weights, 22 rows to train on and 7 held out. Neither
    number is a multiple of the batch."""
    return Inputs(
        make_model(folder / "model"),
        write_rows(folder / "train.jsonl", rows("arithmetic", "train", "demonstration")[:22]),
        write_rows(folder / "eval.jsonl", rows("arithmetic", "eval", "demonstration")[:7]),
        folder / "cache",
    )


def words(inputs: Inputs, output: Path, *more: str) -> list[str]:
    """Return the command line of a run in fp32 in which every gradient is clipped."""
    return [
        "--model", str(inputs.model), "--model.dtype", "fp32",
        "--data.train", str(inputs.train), "--data.eval", str(inputs.eval),
        "--data.workers", "0", "--batch.size", "4", "--batch.tokens", "128",
        "--optim.lr", "1e-2", "--optim.clip", "0.5", "--output", str(output), *more,
    ]  # fmt: skip


def run(arguments: list[str], cache: str, backend: Any = None) -> tuple[int, list[dict[str, Any]]]:
    """Run `rlhf run sft` on this rank; returns its exit code and the lines of metrics.jsonl."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=arguments)
    folder, ended = run_rank(request, backend=backend)
    return 143 if ended == "signal" else 0, read_metrics(folder)


def printed(arguments: list[str], cache: str) -> tuple[str, list[dict[str, Any]]]:
    """As `run`; returns what this rank prints, and the lines of metrics.jsonl."""
    with redirect_stdout(io.StringIO()) as text:
        _, metrics = run(arguments, cache)
    return text.getvalue(), metrics


def wait_for(path: Path, text: str, *processes: subprocess.Popen[str]) -> None:
    """Wait until a file has this text. Fails as soon as one of the processes has ended."""
    deadline = time.monotonic() + 300
    while not (path.exists() and text in path.read_text()):
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{text!r} never came"
        time.sleep(0.05)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
