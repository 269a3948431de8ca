"""What every trainer has to prove, as a class to subclass in a test file.

    class TestMine(TrainerConformance):
        trainer = "mine"
        others = {"power": 2.0}

Each test builds the smallest real runs: a Llama of two layers and 22 rows in fp32 on the CPU, in
plain torch and through DeepSpeed on one and two ranks (the pools of `rlhf.testing.ranks`, shared by
all test files of a session). A trainer takes about half a minute.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
import yaml
from attrs import define, field, frozen

from rlhf import demo
from rlhf.registry.load import load_object
from rlhf.request.layers import to_tree
from rlhf.request.reader import read_config
from rlhf.testing import tiny
from rlhf.testing.ranks import shared
from rlhf.testing.tiny import Metrics

NUM_ROWS, NUM_HELD_OUT = 22, 7
"""Neither divides by the batch of 4."""
NUM_STEPS, STOP_AT = 8, 4
"""The epoch ends after 6 steps: the stop lies inside the first, the end inside the second."""
STAGES = {
    "stage 0": ("--deepspeed.stage", "0"),
    "stage 1": ("--deepspeed.stage", "1"),
    "stage 2": ("--deepspeed.stage", "2"),
    # Below the threshold DeepSpeed keeps weights gathered, and a tiny model would prove nothing.
    "stage 3": ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0"),
}
BUDGETS = {"the least tokens": 1, "twice the tokens": 2, "one micro-batch": 16}
"""`batch.tokens` as multiples of the largest example."""
TIMINGS = ("tokens_per_s", "mfu", "peak_memory_gib", "padding")
EVALUATION = "eval/"


@frozen(kw_only=True)
class Other:
    """Another value of a hyper-parameter that acts only where more is set."""

    value: Any
    under: Mapping[str, Any]
    """Further fields of the trainer's section, set with the default and with `value` alike."""


@define
class Bench:
    """Model, rows and command line of one trainer's tests, and the runs that were made."""

    trainer: str
    folder: Path
    words: list[str]
    cache: str
    longest: int = 0
    """Tokens of the largest example."""
    _made: dict[str, Metrics] = field(factory=dict)

    def plain(self) -> Metrics:
        """The run in plain torch in this process: what all others are held against."""
        if "plain" not in self._made:
            words = [*self.words, "--output", str(self.folder / "plain")]
            self._made["plain"] = tiny.run(self.trainer, words, self.cache, True)
        return self._made["plain"]

    def run(self, name: str, world: int, *words: str) -> Metrics:
        """The run through DeepSpeed on `world` ranks, made once under this name."""
        if name not in self._made:
            self._made[name] = self.start(name, world, *words)
        return self._made[name]

    def start(self, name: str, world: int, *words: str) -> Metrics:
        """The same, made now."""
        given = [*self.words, "--output", str(self.folder / name), *words]
        metrics: Metrics = shared(world).run(tiny.run, self.trainer, given, self.cache)[0]
        return metrics

    def losses(self, settings: Mapping[str, Any]) -> list[float]:
        """The first three losses in plain torch with these fields in the trainer's section."""
        words = [
            word
            for name, value in settings.items()
            for word in (f"--{self.trainer}.{name}", yaml.safe_dump(value).split("\n...")[0])
        ]
        given = [*self.words, "--output", str(self.folder / "unused"), *words]
        return [m.loss for m in tiny.first_steps(self.trainer, given, self.cache, num_steps=3)]


class TrainerConformance:
    """The tests. A subclass names its trainer and gives each of its settings another value."""

    trainer: ClassVar[str]
    """The trainer's name, that of its entry point."""
    rows: ClassVar[Sequence[Mapping[str, Any]] | None] = None
    """At least 29 rows; None takes the demo's in the trainer's row format."""
    words: ClassVar[Sequence[str]] = ()
    """More words for every run's command line; `{model}` is the model's folder, `{other_model}`
    that of one of the same shape with other weights."""
    others: ClassVar[Mapping[str, Any]] = {}
    """Of each field of the trainer's section a value that must change the loss, or an `Other`."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Fields that rightly leave the loss as it is, with the reason."""
    rate: ClassVar[str] = "1e-2"
    """Learning rate of the runs: high enough that a wrong gradient shows in the next loss."""
    clip: ClassVar[str] = "0.05"
    """Largest gradient norm of the runs: below every step's, since AdamW hides a wrong scale."""

    @pytest.fixture(scope="class")
    def bench(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        """The inputs, made once for the class."""
        before = os.environ.get("RLHF_CACHE")
        yield make_bench(type(self), tmp_path_factory.mktemp(f"conformance-{self.trainer}"))
        os.environ.pop("RLHF_CACHE", None)
        if before is not None:
            os.environ["RLHF_CACHE"] = before

    def test_the_record_imports_neither_torch_nor_transformers(self) -> None:
        code = (
            "import sys; from rlhf.request.reader import read_config; "
            f"read_config({self.trainer!r}, inputs=False); "
            "print(sorted({'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == ("[]", "")

    def test_the_configuration_survives_a_round_trip(self, bench: Bench, tmp_path: Path) -> None:
        config = read_config(self.trainer, overrides=bench.words).config
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(to_tree(config), sort_keys=False))
        assert read_config(self.trainer, source=file).config == config

    def test_the_curve_means_something(self, bench: Bench) -> None:
        curve = column(bench.plain(), "loss")
        assert len(set(curve)) == NUM_STEPS, f"the loss stands still: {curve}"
        norms = column(bench.plain(), "grad_norm")
        assert min(norms) > float(self.clip), f"clip does not act on norms of {norms}: lower it"

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_the_curve_on_one_rank_is_that_of_plain_torch(self, budget: str, bench: Bench) -> None:
        tokens = str(BUDGETS[budget] * bench.longest)
        metrics = bench.run(budget, 1, *STAGES["stage 0"], "--batch.tokens", tokens)
        same_curve(metrics, bench.plain())

    @pytest.mark.parametrize("stage", STAGES)
    def test_the_curve_on_two_ranks_is_that_of_plain_torch(self, stage: str, bench: Bench) -> None:
        same_curve(bench.run(stage, 2, *STAGES[stage]), bench.plain())

    @pytest.mark.parametrize("stage", STAGES)
    def test_stop_and_go_on_is_the_same_to_the_last_bit(self, stage: str, bench: Bench) -> None:
        straight = bench.run(stage, 2, *STAGES[stage])
        name = f"{stage} in halves"
        bench.start(name, 2, *STAGES[stage], "--train.stop_at", str(STOP_AT))
        halves = bench.start(name, 2, *STAGES[stage], "--resume")
        assert without_timings(training(halves)) == without_timings(training(straight))
        assert without_timings(halves[-1:]) == without_timings(straight[-1:])
        assert weights(bench.folder / name) == weights(bench.folder / stage)

    def test_packed_equals_separate_in_loss_and_gradients(self, bench: Bench) -> None:
        words = [*bench.words, "--output", str(bench.folder / "unused")]
        words += ["--batch.tokens", str(16 * bench.longest)]
        (packed,) = tiny.first_steps(self.trainer, words, bench.cache, num_steps=1)
        (separate,) = tiny.first_steps(
            self.trainer, words, bench.cache, num_steps=1, path="separate", alone=True
        )
        assert packed.loss == pytest.approx(separate.loss, abs=1e-5)
        assert packed.gradients.keys() == separate.gradients.keys()
        for name, gradient in separate.gradients.items():
            torch.testing.assert_close(packed.gradients[name], gradient, rtol=1e-4, atol=1e-5)

    def test_the_memory_of_a_step_is_told_without_its_weights(self, bench: Bench) -> None:
        words = [*bench.words, "--output", str(bench.folder / "unused")]
        rehearsed, real = tiny.step_memory(self.trainer, words, bench.cache)
        # On the CPU attention keeps copies of keys and values that a fused kernel does not.
        for told, taken in zip(rehearsed, real, strict=True):
            assert told <= taken <= 1.3 * told

    def test_every_hyper_parameter_changes_the_loss(self, bench: Bench) -> None:
        config = read_config(self.trainer, overrides=bench.words).config
        names = {item.name for item in attrs.fields(type(config.own))}
        told = {*self.others, *self.without_effect}
        assert told == names, f"of these settings one side knows nothing: {told ^ names}"
        base = bench.losses({})
        for name, other in self.others.items():
            under = other.under if isinstance(other, Other) else {}
            value = other.value if isinstance(other, Other) else other
            before = bench.losses(under) if under else base
            assert bench.losses({**under, name: value}) != before, f"{name} never reaches the loss"


def make_bench(kit: type[TrainerConformance], folder: Path) -> Bench:
    """Models, rows and command line in `folder`, which is empty."""
    format = load_object(read_config(kit.trainer, inputs=False).plugin.trainer).row_format
    rows = kit.rows or demo.rows("arithmetic", "train", format or "raw")
    train = tiny.write_rows(folder / "train.jsonl", rows[:NUM_ROWS])
    held_out = rows[NUM_ROWS : NUM_ROWS + NUM_HELD_OUT]
    models = {
        "model": tiny.make_model(folder / "model"),
        "other_model": tiny.make_model(folder / "other_model", seed=1),
    }
    words = [
        "--model", str(models["model"]), "--model.dtype", "fp32", "--data.train", str(train),
        "--data.eval", str(tiny.write_rows(folder / "eval.jsonl", held_out)),
        "--data.workers", "0", "--batch.size", "4", "--optim.lr", kit.rate,
        "--optim.clip", kit.clip, "--train.steps", str(NUM_STEPS),
        "--checkpoint.every", "null", *(word.format(**models) for word in kit.words),
    ]  # fmt: skip
    bench = Bench(kit.trainer, folder, words, str(folder / "cache"))
    unused = ["--output", str(folder / "unused")]
    bench.longest = tiny.longest_example(kit.trainer, [*words, *unused], bench.cache)
    bench.words += ["--batch.tokens", str(4 * bench.longest)]
    return bench


def same_curve(metrics: Metrics, plain: Metrics) -> None:
    """Loss to 1e-5 and gradient norm to 1e-4 at every step, and every number of the last
    evaluation."""
    assert column(metrics, "loss") == pytest.approx(column(plain, "loss"), abs=1e-5, rel=1e-5)
    assert column(metrics, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-4)
    assert metrics[-1] == pytest.approx(plain[-1], abs=1e-4, rel=1e-4)


def training(metrics: Metrics) -> Metrics:
    """The lines of steps, without those of evaluations."""
    return [line for line in metrics if not any(name.startswith(EVALUATION) for name in line)]


def column(metrics: Metrics, name: str) -> list[float]:
    """One metric of the training steps, in their order."""
    return [line[name] for line in training(metrics)]


def without_timings(metrics: Metrics) -> Metrics:
    """What must be the same whenever it is computed again."""
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in metrics]


def weights(folder: Path) -> dict[str, bytes]:
    """The exported weights of a run."""
    return {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}
