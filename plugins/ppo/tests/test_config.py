"""The section `ppo`, and what is refused before anything is loaded."""

from typing import Any

import pytest

from rlhf.errors import RLHFError
from rlhf.plugin import OptimConfig
from rlhf_devkit import read_config
from rlhf_plugin_ppo.config import CriticOptim, PPOConfig


def section(*words: str) -> PPOConfig:
    flags = [f"--ppo.{word}" if place % 2 == 0 else word for place, word in enumerate(words)]
    config: Any = read_config("ppo", overrides=flags, inputs=False).config
    own: PPOConfig = config.own
    return own


def test_the_critic_has_the_optimizer_of_the_run_but_for_what_is_set() -> None:
    optim = OptimConfig(lr=1e-6, schedule="linear", clip=0.5)
    assert CriticOptim().over(optim) == OptimConfig(lr=1e-5, schedule="linear", clip=0.5)
    own = CriticOptim(lr=3e-5, schedule="constant", clip=0.0, warmup=0)
    assert own.over(optim) == OptimConfig(lr=3e-5, schedule="constant", clip=0.0, warmup=0)


def test_lambda_is_a_setting() -> None:
    assert section("lambda", "0.9").lambda_ == 0.9


WRONG = {
    ("gamma", "0"): "ppo.gamma: must be > 0: 0.0",
    ("gamma", "1.01"): "ppo.gamma: must be <= 1: 1.01",
    ("lambda", "-0.1"): "ppo.lambda: must be >= 0: -0.1",
    ("lambda", "1.1"): "ppo.lambda: must be <= 1: 1.1",
    ("clip.low", "1"): "ppo.clip.low: must be < 1: 1.0",
    ("clip.value", "0"): "ppo.clip.value: must be > 0: 0.0",
    ("critic.optim.lr", "0"): "ppo.critic.optim.lr: must be > 0: 0.0",
    ("critic.warmup", "-4"): "ppo.critic.warmup: must be >= 0: -4",
    ("critic.warmup", "1"): (
        "ppo: critic.warmup 1 is not a multiple of the 4 steps that a rollout serves (batches "
        "times passes); set it to 4"
    ),
    ("critic.warmup", "9", "batches", "2", "passes", "2"): (
        "ppo: critic.warmup 9 is not a multiple of the 4 steps that a rollout serves (batches "
        "times passes); set it to 12"
    ),
    ("missing_eos_penalty", "-1"): "ppo.missing_eos_penalty: must be >= 0: -1.0",
    ("reward_clip", "0"): "ppo.reward_clip: must be > 0: 0.0",
    ("kl.beta", "0", "kl.target", "6"): (
        "ppo: kl.target needs kl.beta above 0, from which it starts"
    ),
    ("kl.horizon", "100"): "ppo: kl.horizon has no effect without kl.target",
    ("kl.beta", "0", "kl.reference", "engine"): "ppo: kl.reference has no effect with kl.beta 0",
    ("eval.answers", "4"): (
        "ppo: eval.answers 4 are the same with eval.temperature 0; set eval.temperature"
    ),
    ("tools.max_iterations", "2"): (
        "ppo: tools.max_iterations and tools.deadline have no effect without tools.functions or "
        "tools.environment"
    ),
    ("correction.low", "0.1"): ("ppo: correction.low has no effect without correction.kind mask"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_setting_that_is_wrong_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(RLHFError) as caught:
        section(*words)
    assert str(caught.value) == WRONG[words]


NOT_IN_A_RUN = {
    (): "ppo.rewards is empty; name a rule or a function, such as exact",
    ("--ppo.rewards", "exact", "--ppo.critic.model", "no/such/folder"): (
        "ppo.critic.model no/such/folder does not exist; pass a model folder or a name on the hub"
    ),
    ("--ppo.rewards", "exact", "--model.adapter", "some/name"): (
        "ppo: the critic would start without model.adapter, with all of its weights trained; merge "
        "the adapter first with `rlhf merge` and set lora, or set ppo.critic.model"
    ),
    ("--ppo.rewards", "exact", "--ppo.kl.reference", "adapter"): (
        "ppo.reference adapter needs lora; choose engine or cache, or add --lora 16"
    ),
    ("--ppo.rewards", "exact", "--ppo.kl.target", "6", "--ppo.kl.horizon", "10"): (
        "ppo.kl.horizon 10 is too small for rollouts of 128 answers, after which the coefficient "
        "could be 0; raise it above 25"
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", NOT_IN_A_RUN)
def test_what_a_run_lacks_is_refused_before_it_loads(words: tuple[str, ...]) -> None:
    with pytest.raises(RLHFError) as caught:
        read_config("ppo", overrides=["--model", "demo:base", "--data", "demo:sums", *words])
    assert str(caught.value) == NOT_IN_A_RUN[words]
