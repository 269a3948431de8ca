"""The same rewards, advantages, losses and gradients as OpenRLHF and trlX on the same scores,
log-probabilities and values, to 1e-6.

`parity/ppo.json` has the results of functions of both next to what they were given;
`benchmarks/parity_ppo_ilql.py` writes it. Where we differ on purpose, a test says how.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.config.sections import Config
from rlhf.contract.sums import by_role, weighted_loss
from rlhf.trainer import Example, PackedBatch, Sample
from rlhf_devkit import pack
from rlhf_plugin_ppo.advantages import adapted, gae, matrix_of, token_rewards, whitened
from rlhf_plugin_ppo.answers import estimates, trees
from rlhf_plugin_ppo.config import Clip, PPOConfig
from rlhf_plugin_ppo.trainer import PPOTrainer
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.reported import Reported
from rlhf_rollouts.settings import Correction

PEER = json.loads((Path(__file__).parents[1] / "parity" / "ppo.json").read_text())
OPENRLHF, TRLX = PEER["openrlhf"], PEER["trlx"]
LENGTHS = [len(row) for row in PEER["now"]]
TOKENS = sum(LENGTHS)
CORRECTIONS = {"tis": "truncate", "icepop": "mask"}
Case = Mapping[str, Any]


def matrix(name: str) -> Any:
    return matrix_of([PEER[name]])


def flat(rows: Any) -> list[float]:
    return [value for row in rows for value in row if not np.isnan(value)]


def named(case: Case) -> str:
    found = ("value", "values", "gradient", "advantages", "returns", "whitened")
    return " ".join(f"{name} {value}" for name, value in case.items() if name not in found)


def judged() -> Judged:
    """One group of all answers, which were drawn with the log-probabilities of the file."""
    group = [Sample([1] * len(row), row, finished=True) for row in PEER["drawn"]]
    return Judged(groups=[group], by_name={}, total=np.array([PEER["scores"]]))


def rewards_of(case: Case) -> Any:
    scores = np.array(PEER["scores"])
    if case["clip"] is not None:
        scores = scores.clip(-case["clip"], case["clip"])
    return token_rewards(scores, matrix("old") - matrix("reference"), case["beta"])


@pytest.mark.parametrize("case", OPENRLHF["rewards"], ids=named)
def test_rewards_of_tokens(case: Case) -> None:
    assert flat(rewards_of(case)) == pytest.approx(flat(case["values"]), abs=1e-6)


@pytest.mark.parametrize("case", OPENRLHF["advantages"], ids=named)
def test_advantages_and_returns_with_the_divergence_in_the_reward(case: Case) -> None:
    config = PPOConfig(
        gamma=case["gamma"], lambda_=case["lambda"], whiten_advantages=False
    )  # fmt: skip
    log_ratios = matrix("old") - matrix("reference")
    beta = OPENRLHF["rewards"][1]["beta"]
    found = estimates(judged(), matrix("values_before"), log_ratios, config, beta)
    for name in ("advantages", "returns"):
        assert flat(found[name]) == pytest.approx(flat(case[name]), abs=1e-6)


@pytest.mark.parametrize("case", TRLX["advantages"], ids=named)
def test_advantages_of_an_answer_and_the_variance_that_divides_them(case: Case) -> None:
    """trlX divides by the standard deviation with n - 1, in which padding counts too."""
    longest = LENGTHS.index(max(LENGTHS))
    values, rewards = (np.array([PEER[name][longest]]) for name in ("values", "returns"))
    found = gae(rewards, values, gamma=case["gamma"], lambda_=case["lambda"])
    assert found[0].tolist() == pytest.approx(case["advantages"], abs=1e-6)
    assert (found + values)[0].tolist() == pytest.approx(case["returns"], abs=1e-6)
    size = found.size
    unbiased = whitened(found) * np.sqrt((size - 1) / size)
    assert unbiased[0].tolist() == pytest.approx(case["whitened"], abs=1e-6)


@pytest.mark.parametrize("case", TRLX["adapted"], ids=named)
def test_the_coefficient_of_the_divergence(case: Case) -> None:
    found = adapted(0.2, case["kl"], target=6.0, horizon=10000, answers=256)
    assert found == pytest.approx(case["beta"], abs=1e-12)


class Numbers:
    """An engine that gives each prediction the number that the file has for it."""

    module = SimpleNamespace(training=True)

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def __call__(self, batch: PackedBatch, readout: Any) -> dict[str, torch.Tensor]:
        self.places = batch.predict_at
        self.leaf = torch.tensor(flat(PEER[self.kind]), dtype=torch.float64, requires_grad=True)
        entropy = torch.zeros(len(self.leaf))
        return {self.name: self.leaf, "entropy": entropy, "entropy_sum": entropy.sum()}


def losses(config: PPOConfig) -> dict[str, tuple[float, list[float]]]:
    """The loss of one optimizer step by role, and its gradient for each token."""
    trainer = PPOTrainer(config, None)
    trainer.run = SimpleNamespace(config=Config())  # type: ignore[assignment]
    engines = {"policy": Numbers("now", "logprobs"), "critic": Numbers("values", "values")}
    trainer.policy, trainer.critic = engines.values()  # type: ignore[assignment]
    trainer.reference = None
    known = {
        "old": matrix("old"), "values": matrix("values_before"),
        "advantages": matrix("advantages"), "returns": matrix("returns"),
    }  # fmt: skip
    made = trees([Example([2], [])], judged(), known, np.zeros(len(LENGTHS)))
    loss = trainer.loss(pack(Reported().marked(made), [0]))
    found = {}
    for role, part in by_role(loss).items():
        value = weighted_loss(part, {"tokens": float(TOKENS)})
        value.backward()
        grad = engines[role].leaf.grad
        assert grad is not None
        found[role] = (value.item(), grad.tolist())
    return found


def same(found: tuple[float, list[float]], value: float, gradient: Any) -> None:
    assert found[0] == pytest.approx(value, abs=1e-6)
    assert found[1] == pytest.approx(flat(gradient), abs=1e-6)


@pytest.mark.parametrize("case", OPENRLHF["policy"], ids=named)
def test_the_loss_of_the_policy_and_its_gradient(case: Case) -> None:
    clip = Clip(low=case["low"], high=case["high"], dual=case["dual"])
    correction = Correction(kind="none")
    if case["correction"]:
        kind, low, high = case["correction"]
        correction = Correction(kind=CORRECTIONS[kind], low=low or 0.5, high=high)  # type: ignore[arg-type]
    found = losses(PPOConfig(clip=clip, correction=correction))
    same(found["policy"], case["value"], case["gradient"])


@pytest.mark.parametrize("case", OPENRLHF["value"], ids=named)
def test_the_loss_of_the_critic_and_its_gradient(case: Case) -> None:
    found = losses(PPOConfig(clip=Clip(value=case["clip"])))
    same(found["critic"], case["value"], case["gradient"])


def test_policy_and_critic_have_the_losses_that_trlx_adds_up() -> None:
    """There both are heads of one model, so the critic's part has a coefficient."""
    case = TRLX["loss"]
    found = losses(PPOConfig(correction=Correction(kind="none")))
    share = case["vf_coef"]
    assert found["policy"][0] + share * found["critic"][0] == pytest.approx(case["value"], abs=1e-6)
    assert found["policy"][1] == pytest.approx(flat(case["now"]), abs=1e-6)
    critic = [share * slope for slope in found["critic"][1]]
    assert critic == pytest.approx(flat(case["values"]), abs=1e-6)
