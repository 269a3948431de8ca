"""A run that is stopped continues on other hardware: another number of ranks, stage or offload."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import field, frozen

import sft_runs
from rlhf_demo import rows
from rlhf_devkit.curves import Metrics, same_curve
from rlhf_devkit.ranks import shared
from rlhf_devkit.tiny import run, write_rows
from sft_runs import Inputs

PLACES = {
    "1 rank, stage 0": (1, ("--deepspeed.stage", "0")),
    "2 ranks, stage 2": (2, ("--deepspeed.stage", "2")),
    "2 ranks, stage 3": (2, ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "100")),
    "2 ranks, stage 2, offload": (2, ("--deepspeed.preset", "zero2_offload")),
    "2 ranks, stage 3, offload": (2, ("--deepspeed.preset", "zero3_offload")),
    "4 ranks, stage 1": (4, ("--deepspeed.stage", "1")),
}
TRAINED = {
    "all weights": ("sft",),
    "an adapter": ("sft", "--lora", "2"),
    "frozen embeddings": ("sft", "--model.freeze", "model.*embed_tokens*"),
    "a reference that moves": ("dpo", "--dpo.reference_every", "2", "--dpo.reference_mix", "0.5"),
}
QUICK = {
    ("1 rank, stage 0", "2 ranks, stage 3", "all weights"),
    ("2 ranks, stage 3", "1 rank, stage 0", "a reference that moves"),
    ("2 ranks, stage 3", "2 ranks, stage 2", "an adapter"),
}
LENGTH = ("--train.steps", "6", "--optim.schedule", "cosine", "--optim.weight_decay", "0.1")


def moves() -> Iterator[object]:
    """All moves from one place to another with all weights, and each with one of the others."""
    everything, *others = TRAINED
    for number, (source, target) in enumerate(itertools.permutations(PLACES, 2)):
        for trained in (everything, others[number % len(others)]):
            marks = [] if (source, target, trained) in QUICK else [pytest.mark.matrix]
            yield pytest.param(source, target, trained, marks=marks)


@frozen
class Runs:
    """Runs of what `TRAINED` names, and those in plain torch that were made so far."""

    inputs: Inputs
    folder: Path
    plain: dict[str, Metrics] = field(factory=dict)

    def words(self, trained: str, output: Path) -> list[str]:
        """The trainer and the command line of a run."""
        trainer, *settings = TRAINED[trained]
        words = [trainer, *sft_runs.words(self.inputs, output, *LENGTH, *settings)]
        if trainer == "dpo":
            pairs = rows("arithmetic", "train", "preference")
            for name, part in (("train", pairs[:18]), ("eval", pairs[18:24])):
                file = write_rows(self.folder / f"{name}.jsonl", part)
                words += [f"--data.{name}", str(file), "--batch.tokens", "256"]
        return words

    def expected(self, trained: str) -> Metrics:
        """The run in plain torch, without a stop."""
        if trained not in self.plain:
            trainer, *words = self.words(trained, self.folder / trained)
            self.plain[trained] = run(trainer, words, str(self.inputs.cache), True)
        return self.plain[trained]


@pytest.fixture(scope="module")
def runs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(inputs, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(("source", "target", "trained"), moves())
def test_a_run_continues_on_other_hardware(
    source: str, target: str, trained: str, runs: Runs, tmp_path: Path
) -> None:
    trainer, *words = runs.words(trained, tmp_path)
    for place, more in ((source, ("--train.stop_at", "3")), (target, ("--resume",))):
        ranks, layout = PLACES[place]
        given = [*words, *layout, *more]
        metrics, *_ = shared(ranks).run(run, trainer, given, str(runs.inputs.cache))
    same_curve(metrics, runs.expected(trained))
