"""The conformance kit finds what is wrong with a trainer: each fault fails its own test."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.testing import Other, TrainerConformance
from rlhf.testing.conformance import bench_of
from rlhf.testing.curves import same_curve

PLUGIN = """
from attrs import frozen
from rlhf.plugin import TrainerPlugin

@frozen(kw_only=True)
class Section:
    '''A section of which one field does nothing.'''
    scale: float = 1.0
    '''Factor on the loss.'''
    shift: float = 0.0
    '''Added to each log-probability before it is taken to a power.'''
    power: float = 1.0
    '''That power.'''

sound = TrainerPlugin(config=Section, trainer="odd_plugin_trainers:Sound")
means = TrainerPlugin(config=Section, trainer="odd_plugin_trainers:Means")
inert = TrainerPlugin(config=Section, trainer="odd_plugin_trainers:Inert")
"""
TRAINERS = """
import torch
from rlhf.readouts import token_logprobs
from rlhf.trainer import Example, Loss, Term, Trainer

class Sound(Trainer):
    row_format = "demonstration"

    def example(self, row):
        return Example(row.prompt, row.answers)

    def setup(self, run):
        self.policy = run.load("policy")

    def loss(self, batch):
        config = self.config
        lost = config.shift - self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(config.scale * lost.pow(config.power).sum(), per="tokens"),))

class Means(Sound):
    def loss(self, batch):
        lost = -self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(lost.mean() * batch.num_examples, per="examples"),))

class Inert(Sound):
    def loss(self, batch):
        lost = -self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(lost.pow(self.config.power).sum(), per="tokens"),))
"""
OTHERS: dict[str, Any] = {
    "scale": 2.0,
    "power": 2.0,
    "shift": Other(value=0.5, under={"power": 2.0}),
}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with one sound trainer and two that are not."""
    info = tmp_path / "site" / "rlhf_odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: rlhf-odd\nVersion: 1.0\n")
    names = "".join(f"odd_{name} = odd_plugin:{name}\n" for name in ("sound", "means", "inert"))
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


def test_a_sound_trainer_passes(tmp_path: Path) -> None:
    bench = bench_of(Sound, tmp_path)
    Sound().test_the_configuration_survives_a_round_trip(bench, tmp_path)
    Sound().test_the_curve_means_something(bench)
    Sound().test_packed_equals_separate_in_loss_and_gradients(bench)
    Sound().test_every_hyper_parameter_changes_the_loss(bench)


def test_a_mean_over_the_micro_batch_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Means().test_packed_equals_separate_in_loss_and_gradients(bench_of(Means, tmp_path))


def test_a_setting_that_never_reaches_the_loss_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"odd_inert\.scale 2\.0 does not change the loss"):
        Inert().test_every_hyper_parameter_changes_the_loss(bench_of(Inert, tmp_path))


def test_a_setting_that_nobody_speaks_of_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sound, "others", {"scale": 2.0, "power": 2.0})
    advice = r"give others \(or without_effect\) a value for \['shift'\]"
    with pytest.raises(AssertionError, match=advice):
        Sound().test_every_hyper_parameter_changes_the_loss(bench_of(Sound, tmp_path))


def test_curves_are_held_against_each_other_in_loss_norm_and_evaluation() -> None:
    def curve(loss: float = 1.0, norm: float = 2.0, held_out: float = 3.0) -> list[dict[str, Any]]:
        return [{"step": 1, "loss": loss, "grad_norm": norm}, {"step": 1, "eval/loss": held_out}]

    same_curve(curve(1.000005, 2.0001, 3.00001), curve())
    for other in (curve(loss=1.0001), curve(norm=2.001), curve(held_out=3.001)):
        with pytest.raises(AssertionError):
            same_curve(other, curve())
