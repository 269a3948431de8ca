"""The conformance kit finds what is wrong with a trainer: each fault fails its own test."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import rlhf_demo
from rlhf.errors import RLHFError
from rlhf_devkit import Other, TrainerConformance
from rlhf_devkit.bench import NUM_STEPS, Bench
from rlhf_devkit.conformance import bench_of
from rlhf_devkit.curves import same_curve

PLUGIN = """
from attrs import frozen
from rlhf.plugin import TrainerPlugin

@frozen(kw_only=True)
class Section:
    '''A section of which one field does nothing.'''
    scale: float = 1.0
    '''Factor on the loss.'''
    lambda_: float = 0.0
    '''Added to each log-probability before it is taken to a power.'''
    power: float = 1.0
    '''That power.'''

@frozen(kw_only=True)
class Bare:
    '''A section whose field is not documented.'''
    power: float = 1.0

@frozen(kw_only=True)
class Mistyped:
    '''A section whose field has a default of another type.'''
    power: float = "high"
    '''Exponent.'''

@frozen(kw_only=True)
class Adaptive:
    '''A section whose setting makes the trainer keep something.'''
    target: float | None = None
    '''What the factor on the loss approaches, from 1.'''

adaptive = TrainerPlugin(config=Adaptive, trainer="odd_plugin_trainers:Remembering")
forgetful = TrainerPlugin(config=Adaptive, trainer="odd_plugin_trainers:Forgetting")
sound = TrainerPlugin(config=Section, trainer="odd_plugin_trainers:Sound")
means = TrainerPlugin(config=Section, trainer="odd_plugin_trainers:Means")
inert = TrainerPlugin(config=Section, trainer="odd_plugin_trainers:Inert")
sampling = TrainerPlugin(config=Section, trainer="odd_plugin_trainers:Sampling")
bare = TrainerPlugin(config=Bare, trainer="odd_plugin_trainers:Sound")
mistyped = TrainerPlugin(config=Mistyped, trainer="odd_plugin_trainers:Sound")
"""
TRAINERS = """
import torch
from rlhf.readouts import token_logprobs
from rlhf.trainer import Answer, Example, Loss, Term, Trainer

class Sound(Trainer):
    row_format = "demonstration"

    def example(self, row):
        return Example(row.prompt, row.answers)

    def setup(self, run):
        self.policy = run.load("policy")

    def loss(self, batch):
        config = self.config
        lost = config.lambda_ - self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(config.scale * lost.pow(config.power).sum(), per="tokens"),))

class Means(Sound):
    def loss(self, batch):
        lost = -self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(lost.mean() * batch.num_examples, per="examples"),))

class Inert(Sound):
    def loss(self, batch):
        lost = -self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(lost.pow(self.config.power).sum(), per="tokens"),))

class Sampling(Sound):
    most = 40

    def setup(self, run):
        super().setup(run)
        self.run = run

    def rollout(self, examples, step, seeds):
        draws = self.run.sample(
            self.policy, [example.prompt for example in examples for _ in range(3)],
            seeds=[seed + number for seed in seeds for number in range(3)],
            max_new_tokens=self.most,
        )
        lengths.update(len(draw.tokens) for draw in draws)
        return [
            Example(example.prompt, [Answer(draw.tokens) for draw in draws[3 * n : 3 * n + 3]])
            for n, example in enumerate(examples)
        ]

lengths = set()

class Remembering(Sound):
    def __init__(self, config, tokenizer):
        super().__init__(config, tokenizer)
        self.factor = 1.0

    def rollout(self, examples, step, seeds):
        if self.config.target is not None and self.policy.module.training:
            self.factor += 0.3 * (self.config.target - self.factor)
        return examples

    def loss(self, batch):
        lost = -self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(self.factor * lost.sum(), per="tokens"),))

    def state(self):
        return {"factor": self.factor}

    def load_state(self, state):
        self.factor = state.get("factor", 1.0)

class Forgetting(Remembering):
    def state(self):
        return {}
"""
OTHERS: dict[str, Any] = {
    "scale": 2.0,
    "power": 2.0,
    "lambda": Other(value=0.5, under={"power": 2.0}),
}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with two sound trainers and others that are not."""
    info = tmp_path / "site" / "rlhf_odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: rlhf-odd\nVersion: 1.0\n")
    trainers = ("sound", "means", "inert", "sampling", "bare", "mistyped")
    trainers += ("adaptive", "forgetful")
    names = "".join(f"odd_{name} = odd_plugin:{name}\n" for name in trainers)
    (info / "entry_points.txt").write_text(f"[rlhf.trainers]\n{names}")
    (info.parent / "odd_plugin.py").write_text(PLUGIN)
    (info.parent / "odd_plugin_trainers.py").write_text(TRAINERS)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(info.parent))
    importlib.invalidate_caches()
    yield
    for name in ("odd_plugin", "odd_plugin_trainers"):
        sys.modules.pop(name, None)


class Sound(TrainerConformance):
    trainer = "odd_sound"
    others = OTHERS


class Means(TrainerConformance):
    trainer = "odd_means"
    others = OTHERS


class Inert(TrainerConformance):
    trainer = "odd_inert"
    others = OTHERS


class Sampling(TrainerConformance):
    trainer = "odd_sampling"
    others = OTHERS


def test_a_sound_trainer_passes(tmp_path: Path) -> None:
    bench = bench_of(Sound, tmp_path)
    Sound().test_the_configuration_survives_a_round_trip(bench, tmp_path)
    Sound().test_the_curve_means_something(bench)
    Sound().test_packed_equals_separate_in_loss_and_gradients(bench)
    Sound().test_every_hyper_parameter_changes_the_loss(bench)


class Remembering(TrainerConformance):
    trainer = "odd_adaptive"
    others: ClassVar[dict[str, Any]] = {"target": 2.0}


class Forgetting(Remembering):
    trainer = "odd_forgetful"


def test_the_kit_detects_a_state_that_only_another_setting_has(tmp_path: Path) -> None:
    Remembering().test_a_run_with_another_setting_resumes_to_the_last_bit(
        bench_of(Remembering, tmp_path / "remembering")
    )
    bench = bench_of(Forgetting, tmp_path / "forgetting")
    with pytest.raises(AssertionError) as caught:
        Forgetting().test_a_run_with_another_setting_resumes_to_the_last_bit(bench)
    assert str(caught.value).startswith(
        "with odd_forgetful.target 2.0 a resumed run differs in its metrics; does `state` return "
        "all that the trainer keeps?"
    )


def test_the_kit_detects_a_mean_over_the_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Means().test_packed_equals_separate_in_loss_and_gradients(bench_of(Means, tmp_path))


def test_a_setting_that_never_reaches_the_loss_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"odd_inert\.scale 2\.0 does not change the loss"):
        Inert().test_every_hyper_parameter_changes_the_loss(bench_of(Inert, tmp_path))


def test_the_kit_says_if_one_rollout_serves_all_steps_and_no_answer_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampling, "others", {"scale": 1.0, "power": 2.0, "lambda": 0.5})
    bench = bench_of(Sampling, tmp_path)
    trainer = importlib.import_module("odd_plugin_trainers").Sampling
    monkeypatch.setattr(trainer, "rollout_passes", 2)
    monkeypatch.setattr(trainer, "rollout_batches", 6)
    monkeypatch.setattr(trainer, "most", 2)
    with pytest.raises(AssertionError) as caught:
        Sampling().test_every_hyper_parameter_changes_the_loss(bench)
    assert str(caught.value).startswith(
        "odd_sampling.scale 1.0 does not change the loss; one rollout serves all 8 steps; none of "
        "its 66 answers ends with EOS, which `{ending_model}` often writes"
    )


def test_the_kit_names_a_setting_without_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sound, "others", {"scale": 2.0, "power": 2.0})
    advice = r"give others \(or without_effect\) a value for \['lambda'\]"
    with pytest.raises(AssertionError, match=advice):
        Sound().test_every_hyper_parameter_changes_the_loss(bench_of(Sound, tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", "`rlhf config` prints the docstrings of settings; add one to ['power']"),
        ("mistyped", 'odd_mistyped.power: expected a number, got "high"'),
    ],
)
def test_the_kit_names_a_setting_without_a_docstring_or_with_a_default_of_another_type(
    name: str, message: str, tmp_path: Path
) -> None:
    kit = type("Kit", (Sound,), {"trainer": f"odd_{name}"})
    with pytest.raises((AssertionError, RLHFError)) as caught:
        kit().test_the_configuration_survives_a_round_trip(bench_of(kit, tmp_path), tmp_path)
    assert str(caught.value).startswith(message)


def test_the_budget_holds_the_answers_of_a_rollout_which_end_at_different_lengths(
    tmp_path: Path,
) -> None:
    rows_only = bench_of(Sound, tmp_path / "sound").longest
    bench = bench_of(Sampling, tmp_path / "sampling")
    lengths = importlib.import_module("odd_plugin_trainers").lengths
    assert min(lengths) < 20 < max(lengths)
    assert bench.longest > rows_only
    assert len(bench.plain()) == NUM_STEPS + 1


def test_a_run_that_failed_raises_its_error_once_and_is_named_afterwards(tmp_path: Path) -> None:
    bench = Bench("odd_sound", "odd_sound", tmp_path, ["--no.such", "1"], str(tmp_path))
    with pytest.raises(RLHFError, match=r"has no demo; pass --model and --data$") as caught:
        bench.plain()
    with pytest.raises(pytest.fail.Exception) as again:
        bench.plain()
    assert str(again.value) == (
        "the run 'plain' failed in test_a_run_that_failed_raises_its_error_once_and_is_named_"
        f"afterwards: RLHFError: {caught.value}"
    )


def test_the_kit_detects_a_run_that_only_fails_in_bf16() -> None:
    def curve(*losses: float) -> list[dict[str, Any]]:
        return [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]

    def bench(*losses: float) -> Any:
        plain = curve(1.0, 2.0, 3.0)
        return SimpleNamespace(plain=lambda: plain, run=lambda *words: curve(*losses))

    begins = Sound().test_a_run_in_another_precision_begins_like_that_in_fp32
    begins("bf16", bench(1.05, 1.9))
    for losses in ((1.5, 2.0), (1.0, float("nan"))):
        with pytest.raises(AssertionError, match=r"^at model\.dtype bf16 the first losses are"):
            begins("bf16", bench(*losses))


def test_too_few_rows_are_an_error(tmp_path: Path) -> None:
    class Few(Sound):
        rows = rlhf_demo.rows("arithmetic", "train", "demonstration")[:28]

    with pytest.raises(AssertionError) as error:
        bench_of(Few, tmp_path)
    assert str(error.value).startswith(
        "odd_sound: the tests train on 22 rows and hold out 7; give 29 rows instead of 28"
    )


def test_curves_are_compared_in_loss_norm_and_evaluation() -> None:
    def curve(loss: float = 1.0, norm: float = 2.0, held_out: float = 3.0) -> list[dict[str, Any]]:
        return [{"step": 1, "loss": loss, "grad_norm": norm}, {"step": 1, "eval/loss": held_out}]

    same_curve(curve(1.000005, 2.0001, 3.00001), curve())
    for other, promise in (
        (curve(loss=1.0001), "loss differs from the run in plain torch: at step 1 1.0001 instead"),
        (curve(norm=2.001), "grad_norm differs from the run in plain torch: at step 1 2.001"),
        (curve(held_out=3.001), "the last evaluation differs from that of the run in plain torch"),
    ):
        with pytest.raises(AssertionError) as error:
            same_curve(other, curve())
        assert str(error.value).startswith(promise)
        # pytest shows the values in the modules of the kit, in every distribution's tests.
        assert "\nassert " in str(error.value)
