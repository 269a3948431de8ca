"""The same loss as the field on the same rewards and step scores, to 1e-6.

`parity/rewards.json` holds numbers that the loss code of TRL, OpenRLHF and transformers gave for
the inputs that stand beside them (which releases and when is written in it); none of their code is
here. Where they fail and we do not, the test says how.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.contract.sums import Sums, weighted_loss
from rlhf.data.example import Answer
from rlhf.data.packing import pack
from rlhf.engine import Mesh
from rlhf.formats import Row
from rlhf_plugin_prm.config import PRMConfig
from rlhf_plugin_prm.losses import log_odds, step_loss
from rlhf_plugin_prm.trainer import PRMTrainer
from rlhf_plugin_rm.config import RMConfig
from rlhf_plugin_rm.losses import bradley_terry
from rlhf_plugin_rm.trainer import RMTrainer

PEER = json.loads((Path(__file__).parents[1] / "parity" / "rewards.json").read_text())
REWARDS, PROCESS = PEER["rewards"], PEER["process"]
PAIRS = list(zip(REWARDS["chosen"], REWARDS["rejected"], strict=True))
COUNTS = {"examples": float(len(PAIRS)), "answers": 2.0 * len(PAIRS)}


def loss_of(**settings: Any) -> tuple[RMTrainer, Any]:
    """The reward trainer with an engine that gives the file's rewards, and its loss of them."""
    trainer = RMTrainer(RMConfig(**settings), tokenizer=None)
    given = torch.tensor(PAIRS, dtype=torch.float64).flatten()
    trainer.policy = lambda batch, readout: {"scores": given}
    rows = [
        SimpleNamespace(
            prompt=[1],
            answers=[Answer([2]), Answer([3])],
            columns={"ranks": [1.0, 2.0], "margin": margin},
        )
        for margin in REWARDS["margin"]
    ]
    return trainer, trainer.loss(pack([trainer.example(row) for row in rows], range(len(rows))))


@pytest.mark.parametrize(
    "case",
    PEER["reward"],
    ids=lambda case: f"{case['class']} margin {case['margin']} centring {case['centring']}",
)
def test_pairs_with_margin_and_centring(case: dict[str, Any]) -> None:
    settings = {"margin": float(case["margin"]), "centring": case["centring"]}
    _, loss = loss_of(**settings)
    assert weighted_loss(loss, COUNTS).item() == pytest.approx(case["value"], abs=1e-6)


def test_the_metrics_of_the_same_rewards() -> None:
    trainer, loss = loss_of()
    sums = Sums(Mesh())
    sums.add_terms(loss)
    found = sums.reduce(COUNTS).read(trainer.derive)
    expected = {name: value for name, value in PEER["reward_metrics"].items() if name != "peer"}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_rewards_at_which_the_peer_overflows() -> None:
    case = PEER["overflow"]
    assert case["value"] == "inf"
    difference = torch.tensor(case["chosen"] - case["rejected"])
    assert bradley_terry(difference, torch.tensor(0.0)).item() == 100.0


def steps_loss(scores: Tensor, labels: list[float]) -> float:
    return step_loss(log_odds(scores), torch.tensor(labels, dtype=torch.float64)).mean().item()


@pytest.mark.parametrize("case", PROCESS["cases"], ids=["hard labels", "soft labels"])
def test_steps_judged_by_reward_tokens(case: dict[str, Any]) -> None:
    tokens = PROCESS["reward_tokens"]
    logits = torch.tensor(PROCESS["logits"], dtype=torch.float64)
    found = steps_loss(logits[:, [tokens["wrong"], tokens["right"]]], case["labels"])
    assert found == pytest.approx(case["value"], abs=1e-6)


def test_steps_judged_by_a_token_classifier() -> None:
    case = PROCESS["head"]
    known = [place for place, label in enumerate(case["labels"]) if label is not None]
    logits = torch.tensor(PROCESS["logits"], dtype=torch.float64)[known, :2]
    found = steps_loss(logits, [case["labels"][place] for place in known])
    assert found == pytest.approx(case["value"], abs=1e-6)


def test_a_batch_without_a_marked_step_which_is_not_a_number_to_the_peer() -> None:
    assert PROCESS["without_a_mark"]["value"] == "nan"
    trainer = PRMTrainer(PRMConfig(), tokenizer=None)
    scores = torch.tensor(PROCESS["logits"])[:, :2].requires_grad_()
    trainer.policy = lambda batch, readout: {"scores": scores}
    size = len(PROCESS["logits"]) - 1
    columns = {"ends": [size - 1], "labels": [math.nan]}
    row = Row([1], [Answer([2] * size)], columns)
    loss = weighted_loss(trainer.loss(pack([trainer.example(row)], [0])), {"labels": 3.0})
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad is not None
    assert not scores.grad.any()
