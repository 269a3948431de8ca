"""The section `grpo`: presets, and combinations that are known to be wrong."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.errors import RLHFError
from rlhf_devkit import read_config
from rlhf_plugin_grpo.config import GRPOConfig
from rlhf_plugin_grpo.presets import PRESETS, Method
from rlhf_plugin_grpo.trainer import GRPOTrainer
from rlhf_rollouts.room import check_whole


def section(*words: str) -> GRPOConfig:
    flags = [f"--grpo.{word}" if place % 2 == 0 else word for place, word in enumerate(words)]
    config: Any = read_config("grpo", overrides=flags, inputs=False).config
    own: GRPOConfig = config.own
    return own


def test_a_preset_is_the_method_of_its_paper() -> None:
    assert section().method == Method(
        advantage="mean", scale="group", ratio="token", clip_kind="ppo", clip_low=0.2,
        clip_high=0.28, per="tokens", kl_beta=0.0, truncated="soft", filter="zero_variance",
    )  # fmt: skip
    assert [section("preset", name).method for name in PRESETS] == [*PRESETS.values()]


def test_a_setting_replaces_that_of_the_preset_and_is_named() -> None:
    method = section("preset", "gspo", "clip.high", "0.01", "per", "tokens", "kl.in", "reward",
                     "kl.beta", "0.1").method  # fmt: skip
    assert method.changed(PRESETS["gspo"]) == [
        "clip.high 0.01 instead of 0.0004",
        "per tokens instead of answers",
        "kl.beta 0.1 instead of 0",
        "kl.in reward instead of loss",
    ]


def test_a_reward_may_be_only_a_name() -> None:
    assert [spec.label for spec in section("rewards", "exact").rewards] == ["exact"]


def test_a_mixture_with_a_router_loss_needs_whole_groups() -> None:
    trainer = GRPOTrainer(section("answers", "4", "max_new_tokens", "30"), None)
    rows = [SimpleNamespace(prompt_lengths=np.array([10, 4]))]
    for budget in (130, 129):
        config = SimpleNamespace(
            batch=SimpleNamespace(budget=budget), data=SimpleNamespace(max_tokens=64)
        )
        run: Any = SimpleNamespace(config=config, examples=rows)
        if budget == 130:
            check_whole(run, trainer.rollout_shape)
            continue
        with pytest.raises(RLHFError) as caught:
            check_whole(run, trainer.rollout_shape)
    assert str(caught.value) == (
        "a group may have 130 tokens but batch.tokens is 129, and the router loss of a mixture "
        "needs whole groups; set batch.tokens to at least 130, or model.router_loss to 0"
    )


WRONG = {
    ("advantage", "leave_one_out"): (
        "advantage leave_one_out cannot be combined with scale group: one answer that differs from "
        "all others would get an advantage without bound; set scale to none"
    ),
    ("answers", "1"): (
        "answers 1 leaves nothing to compare; raise it, or set advantage, scale and filter to none"
    ),
    ("advantage", "none", "scale", "batch"): (
        "advantage none cannot be combined with scale batch: rewards that are nearly equal would "
        "get advantages without bound; set scale to none"
    ),
    ("preset", "rloo", "aggregation", "normalize_then_sum"): (
        "aggregation normalize_then_sum cannot be combined with kl.in reward, since the penalty "
        "would lose its size; set kl.in to loss"
    ),
    ("eval.answers", "8"): (
        "eval.answers 8 are the same with eval.temperature 0; set eval.temperature"
    ),
    ("clip.kind", "cispo", "clip.low", "0.1"): (
        "clip.low and clip.dual have no effect with clip.kind cispo"
    ),
    ("clip.kind", "none", "clip.dual", "3"): (
        "clip.low and clip.dual have no effect with clip.kind none"
    ),
    ("preset", "rloo", "clip.high", "0.1"): "clip.high has no effect with clip.kind none",
    ("loss", "mine:loss", "ratio", "sequence"): (
        "clip and ratio have no effect with a loss of your own"
    ),
    ("kl.estimator", "k2"): (
        "kl.in, kl.estimator, kl.reference and kl.every have no effect with kl.beta 0"
    ),
    ("preset", "rloo", "kl.estimator", "k3"): (
        "kl.estimator k3 is for the loss; in the reward the penalty is the log-ratio itself, so "
        "remove it"
    ),
    ("tools.deadline", "5"): (
        "tools.max_iterations and tools.deadline have no effect without tools.functions or "
        "tools.environment"
    ),
    ("correction.low", "0.1"): "correction.low has no effect without correction.kind mask",
    ("correction.kind", "none", "correction.high", "3"): (
        "correction.high and correction.level have no effect with correction.kind none"
    ),
    ("correction.kind", "none", "correction.level", "sequence"): (
        "correction.high and correction.level have no effect with correction.kind none"
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_combination_that_is_wrong_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(RLHFError) as caught:
        section(*words)
    assert str(caught.value) == f"grpo: {WRONG[words]}"


VALUES = {
    ("kl.estimator", "k1"): 'grpo.kl.estimator: expected one of k2, k3, got "k1"',
    # Some engines would draw at another temperature than that of the loss.
    ("temperature", "0.001"): "grpo.temperature: must be >= 0.01: 0.001",
    ("stop", "("): (
        "grpo.stop: '(' is not a regular expression: missing ), unterminated subpattern at "
        "position 0"
    ),
    ("loss", "mine"): "grpo.loss: 'mine' does not name a function; write module:function",
}


@pytest.mark.parametrize("words", VALUES)
def test_a_value_that_is_wrong_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(RLHFError) as caught:
        section(*words)
    assert str(caught.value) == VALUES[words]


def test_a_run_needs_a_reward() -> None:
    words = ["--model", "demo:base", "--data", "demo:sums"]
    with pytest.raises(RLHFError) as caught:
        read_config("grpo", overrides=words)
    assert str(caught.value) == ("grpo.rewards is empty; name a rule or a function, such as exact")
