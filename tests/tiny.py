"""The smallest real inputs of a run, and a run as a function that ranks of a test can call."""

import json
import os
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.demo import rows
from rlhf.testing.tiny import make_model
from rlhf.testing.tiny import write_rows as write


@frozen
class Inputs:
    """Where the model and the rows are."""

    model: Path
    train: Path
    eval: Path
    cache: Path


def make(folder: Path) -> Inputs:
    """A Llama of two layers with random weights, 22 rows to train on and 7 held out: neither
    divides by a batch."""
    return Inputs(
        make_model(folder / "model"),
        write(folder / "train.jsonl", rows("arithmetic", "train", "demonstration")[:22]),
        write(folder / "eval.jsonl", rows("arithmetic", "eval", "demonstration")[:7]),
        folder / "cache",
    )


def words(inputs: Inputs, output: Path, *more: str) -> list[str]:
    """The command line of a tiny SFT run in fp32, with clipping that acts at every step."""
    return [
        "--model", str(inputs.model), "--model.dtype", "fp32",
        "--data.train", str(inputs.train), "--data.eval", str(inputs.eval),
        "--data.workers", "0", "--batch.size", "4", "--batch.tokens", "128",
        "--optim.lr", "1e-2", "--optim.clip", "0.5", "--output", str(output), *more,
    ]  # fmt: skip


def run(arguments: list[str], cache: str, backend: Any = None) -> tuple[int, list[dict[str, Any]]]:
    """`rlhf run sft` on this rank: its exit code and what metrics.jsonl holds afterwards."""
    from rlhf.request.reader import read_config
    from rlhf.run.rank import run_rank

    os.environ["RLHF_CACHE"] = cache
    request = read_config("sft", overrides=arguments)
    code = run_rank(request, backend=backend)
    return code, read_metrics(Path(request.config.output or ""))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(metrics: list[dict[str, Any]], name: str) -> list[float]:
    """One metric of the training steps, in their order."""
    return [line[name] for line in metrics if name in line and "eval/loss" not in line]
