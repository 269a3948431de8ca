"""KTO's loss against the field's on the same log-probabilities, to 1e-6.

`parity/trl.json` and `parity/openrlhf.json` hold the numbers with their provenance; none of the
peers' code is here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_plugin_kto.losses import divergence, kto

FOLDER = Path(__file__).parents[1] / "parity"
TRL = json.loads((FOLDER / "trl.json").read_text())
OPENRLHF = json.loads((FOLDER / "openrlhf.json").read_text())
DESIRABLE = torch.tensor([1.0] * 4 + [0.0] * 3)


def logratios() -> Tensor:
    """The file's chosen answers and the first three of its rejected ones [7]."""
    sides = ("chosen", "rejected")
    policy = [sum(tokens) for side in sides for tokens in TRL["token_logprobs"][side]]
    reference = [value for side in sides for value in TRL["reference_logprobs"][side]]
    return (torch.tensor(policy).double() - torch.tensor(reference).double())[:7]


def mismatched() -> Tensor:
    """Log-ratios of the answers that do not belong to their prompts [5]."""
    given = TRL["kto"]
    policy, reference = given["kl_logprobs"], given["kl_reference_logprobs"]
    return torch.tensor(policy).double() - torch.tensor(reference).double()


def loss(case: dict[str, Any], point: Tensor | float) -> float:
    """Our mean over the seven rows."""
    names = ("beta", "desirable_weight", "undesirable_weight")
    settings = {name: case[name] for name in names}
    return kto(logratios(), DESIRABLE, point, **settings).mean().item()


@pytest.mark.parametrize("case", TRL["kto"]["cases"])
def test_the_peers_loss_and_divergence(case: dict[str, Any]) -> None:
    paired = case["loss"] == "kto"
    ratios = -mismatched() if case.get("clamped") else mismatched()
    point = divergence(ratios) if paired else 0.0
    assert float(point) == pytest.approx(case["kl"], abs=1e-6)
    assert loss(case, point) == pytest.approx(case["value"], abs=1e-6)


@pytest.mark.parametrize("case", OPENRLHF["kto"])
def test_the_other_peers_loss_and_divergence(case: dict[str, Any]) -> None:
    point = divergence(mismatched())
    assert point.item() == pytest.approx(case["kl"], abs=1e-6)
    assert loss(case, point) == pytest.approx(case["value"], abs=1e-6)


def test_trl_has_no_divergence_with_one_row_per_micro_batch() -> None:
    """TRL pairs a prompt with the completion before it in the same micro-batch. In micro-batches of
    one that is its own: the mean over these seven rows is 0.456389 there and 0.423260 with the
    divergence 0.24 of mismatched answers, which our survey gives whatever the micro-batch."""
    case = {"beta": 0.5, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    separate = [divergence(ratio[None]) for ratio in logratios()]
    theirs = TRL["kto"]["value_at_one_row_per_batch"]
    assert theirs == pytest.approx(0.456389, abs=1e-6)
    assert loss(case, torch.stack(separate)) == pytest.approx(theirs, abs=1e-6)
    assert loss(case, divergence(mismatched())) == pytest.approx(0.423260, abs=1e-6)
