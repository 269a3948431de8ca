"""Sequence parallelism: ranks that divide the tokens of each row follow the curve of one rank."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.data.order import RunOrder
from rlhf.engine import Axis
from rlhf.model.sequence import part_of_rank
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf_devkit.curves import Metrics, same_curve
from rlhf_devkit.ranks import Ranks, shared
from rlhf_devkit.tiny import make_model, run, short_run

STAGES = {
    "0": ("--deepspeed.stage", "0"),
    "1": ("--deepspeed.stage", "1"),
    "2": ("--deepspeed.stage", "2"),
    "3": ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0"),
}
TRAINERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sft": ("sft", "demonstration", ()),
    "dpo": ("dpo", "preference", ("--dpo.reference", "engine")),
    "rm": ("rm", "preference", ()),
    "kd": ("kd", "demonstration", ("--kd.teacher", "{teacher}")),
    "kto": ("kto", "unpaired", ()),
    "prm": ("prm", "stepwise", ()),
}
QUICK = {("sft", "1"), ("dpo", "3"), ("rm", "2"), ("kd", "0")}
"""Each readout and each stage."""


class Bench:
    """The inputs of each workflow and its run in plain torch on one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plain: dict[str, Metrics] = {}

    def words(self, name: str, output: Path, *more: str) -> tuple[str, list[str]]:
        trainer, row_format, settings = TRAINERS[name]
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            make_model(folder / "teacher", seed=1)
            short_run(folder, row_format)
        words = short_run(folder, row_format)
        # A norm above the clip: AdamW hides a gradient of the wrong scale.
        words += ["--optim.clip", "0.05", "--output", str(output), *more]
        words += [word.replace("{teacher}", str(folder / "teacher")) for word in settings]
        return trainer, words

    def plain(self, name: str) -> Metrics:
        if name not in self._plain:
            trainer, words = self.words(name, self.folder / f"{name}-plain")
            self._plain[name] = run(trainer, words, str(self.folder / "cache"), True)
        return self._plain[name]

    def divided(self, name: str, output: Path, ranks: Ranks, size: int, *more: str) -> Metrics:
        axis = ("--deepspeed.sequence_parallel", str(size))
        trainer, words = self.words(name, output, *axis, *more)
        found: list[Any] = ranks.run(run, trainer, words, str(self.folder / "cache"))
        return found[0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("sequence"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TRAINERS)
def test_ranks_of_these_runs_divide_a_tree_in_every_step(
    name: str, size: int, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(bench.folder / "cache"))
    trainer, words = bench.words(name, tmp_path / "run")
    request = read_config(trainer, overrides=words)
    order = RunOrder(examples=prepare_data(request).train, config=request.config)
    axes = [Axis(rank=rank, size=size) for rank in range(1, size)]
    for number in range(4):
        divided = []
        for batch in map(order.__getitem__, order.step(number).micro):
            ends = [*itertools.accumulate(prompt + sum(answers) for prompt, answers in batch.spans)]
            cuts = [part_of_rank(len(batch.tokens), axis).start for axis in axes]
            # The prompt begins before the first token of a rank, and the last answer ends after it.
            divided += [cut not in ends and cut < ends[-1] for cut in cuts]
        assert any(divided)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=[] if (name, stage) in QUICK else [pytest.mark.matrix])
        for name in TRAINERS
        for stage in STAGES
    ],
)
def test_two_sequence_ranks_follow_the_curve_of_one(
    name: str, stage: str, bench: Bench, two: Ranks, tmp_path: Path
) -> None:
    found = bench.divided(name, tmp_path / "run", two, 2, *STAGES[stage])
    same_curve(found, bench.plain(name))


@pytest.mark.parametrize(
    ("name", "size", "stage"),
    [
        ("kd", 4, "3"),
        pytest.param("dpo", 2, "2", marks=pytest.mark.matrix),
        *(pytest.param(name, 2, "3", marks=pytest.mark.matrix) for name in TRAINERS),
        *(pytest.param(name, 4, "1", marks=pytest.mark.matrix) for name in TRAINERS),
    ],
)
def test_four_ranks_follow_the_curve_of_one(
    name: str, size: int, stage: str, bench: Bench, tmp_path: Path
) -> None:
    # With 4 sequence ranks each of the two KV heads is on two of them.
    found = bench.divided(name, tmp_path / "run", shared(4), size, *STAGES[stage])
    same_curve(found, bench.plain(name))


OTHER_SETTINGS = {
    "an adapter": ("dpo", ("--lora.rank", "4", "--dpo.reference", "adapter")),
    "a cached reference": ("dpo", ("--dpo.reference", "cache")),
    "recomputation": ("sft", ("--model.recompute", "full", "--batch.tokens", "128")),
    "answers of its own": ("kd", ("--kd.on_policy", "1", "--kd.max_new_tokens", "8")),
    "an optimizer on the CPU": ("rm", ("--deepspeed.offload_optimizer", "true")),
    "Muon": ("dpo", ("--optim.name", "muon")),
}


@pytest.mark.parametrize(
    "setting",
    [
        name if name == "answers of its own" else pytest.param(name, marks=pytest.mark.matrix)
        for name in OTHER_SETTINGS
    ],
)
def test_other_settings_follow_the_same_curve(setting: str, bench: Bench, tmp_path: Path) -> None:
    name, words = OTHER_SETTINGS[setting]
    layout = STAGES["2"] if setting == "an optimizer on the CPU" else STAGES["3"]
    curves = [
        bench.divided(name, tmp_path / str(world), shared(world), size, *layout, *words)
        for world, size in ((1, 1), (2, 2))
    ]
    same_curve(curves[1], curves[0])


def test_ranks_of_a_row_share_a_second_copy_of_the_weights(bench: Bench, tmp_path: Path) -> None:
    # So that layers are gathered again in backward.
    released = "{stage3_max_reuse_distance: 0, stage3_prefetch_bucket_size: 0}"
    words = ("--deepspeed.hpz_partition_size", "2", "--deepspeed.frozen", "3", *STAGES["3"])
    words += ("--deepspeed.config", f"{{zero_optimization: {released}}}")
    found = bench.divided("dpo", tmp_path / "run", shared(4), 2, *words)
    same_curve(found, bench.plain("dpo"))


@pytest.mark.parametrize(
    "name",
    [name if name == "sft" else pytest.param(name, marks=pytest.mark.matrix) for name in TRAINERS],
)
def test_a_run_continues_with_another_sequence_size_and_exports_the_same_model(
    name: str, bench: Bench, tmp_path: Path
) -> None:
    first, last = ("--train.stop_at", "2"), ("--resume",)
    places = ((4, 2, "1", first), (2, 1, "3", (*last, "--train.stop_at", "3")), (2, 2, "2", last))
    for world, size, stage, more in places:
        found = bench.divided(name, tmp_path / "run", shared(world), size, *STAGES[stage], *more)
        if world == 4:
            # Ranks with other tokens of the same rows have other random numbers too.
            states = (tmp_path / "run/checkpoints/step-000002").glob("random-*")
            assert len({path.read_bytes() for path in states}) == 4
    same_curve(found, bench.plain(name))
    ours, plain = (
        load_file(folder / "model" / "model.safetensors")
        for folder in (tmp_path / "run", bench.folder / f"{name}-plain")
    )
    assert ours.keys() == plain.keys()
    for weight, value in ours.items():
        torch.testing.assert_close(value, plain[weight], atol=1e-4, rtol=1e-4)
