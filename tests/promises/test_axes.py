"""Core counts data ranks only: two ranks of one tensor axis compute what one rank does, to the last
bit, where a sum, a count, a draw or a cache over all ranks would not."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.engine import Mesh, axes
from rlhf.hookspecs import hookimpl
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf_devkit import Ranks, without_timings
from rlhf_devkit.curves import weights
from rlhf_devkit.plain import PlainBackend, seed
from rlhf_devkit.tiny import short_run
from sft_runs import read_metrics

CASES = {
    "counts and sums": ("sft", "demonstration", ()),
    "a survey": ("kto", "unpaired", ("--kto.reference", "engine")),
    "a cached reference": ("dpo", "preference", ("--dpo.reference", "cache")),
    "a cached survey": ("kto", "unpaired", ("--kto.reference", "cache")),
    "answers of its own": (
        "kd",
        "demonstration",
        (
            "--kd.teacher",
            "{model}",
            "--kd.on_policy",
            "1",
            "--kd.max_new_tokens",
            "8",
            "--batch.tokens",
            "128",
        ),
    ),
    "dropout": ("sft", "demonstration", ("--lora.rank", "4", "--lora.dropout", "0.5")),
}


class TensorRanks(PlainBackend):
    """Plain torch on two ranks that are one tensor axis: both compute the same rows."""

    @hookimpl
    def setup_mesh(self, config: Any) -> Mesh:
        seed(config)
        rank = torch.distributed.get_rank()
        return Mesh(rank=rank, world=2, local_rank=rank, **axes(rank, tensor=2))

    @hookimpl
    def weights(self, engine: Any, buckets: Any) -> Any:
        own, other = Mesh(world=2).gather([*engine.module.parameters()])
        assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))
        return super().weights(engine, buckets)


def run(trainer: str, words: list[str], cache: str, backend: type[PlainBackend]) -> None:
    os.environ["RLHF_CACHE"] = cache
    assert run_rank(read_config(trainer, overrides=words), backend=backend())[1] == "done"


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_axis_computes_what_one_rank_does(
    name: str, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    trainer, row_format, more = CASES[name]
    words = short_run(tmp_path, row_format)
    words += [word.replace("{model}", str(tmp_path / "model")) for word in more]
    runs = {"one": (one, PlainBackend), "two": (two, TensorRanks)}
    for folder, (ranks, backend) in runs.items():
        own = [*words, "--output", str(tmp_path / folder)]
        ranks.run(run, trainer, own, str(tmp_path / f"{folder} cache"), backend)
    single, axis = tmp_path / "one", tmp_path / "two"
    assert without_timings(read_metrics(axis)) == without_timings(read_metrics(single))
    assert weights(axis) == weights(single)
