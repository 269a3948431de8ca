"""The same losses and gradients as trlX's ILQL on the same logits, values, actions and rewards, to
1e-6.

`parity/ilql.json` has the results of trlX's `ILQLConfig.loss` next to what it was given;
`benchmarks/parity_ppo_ilql.py` writes it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.contract.sums import weighted_loss
from rlhf.trainer import Answer, Example, PackedBatch
from rlhf_devkit import pack
from rlhf_plugin_ilql.config import ILQLConfig
from rlhf_plugin_ilql.heads import q_names
from rlhf_plugin_ilql.trainer import ILQLTrainer

PEER = json.loads((Path(__file__).parents[1] / "parity" / "ilql.json").read_text())
TOKENS = sum(len(row) for row in PEER["actions"])
Case = Mapping[str, Any]


def numbers(value: Any) -> Iterator[float]:
    """The numbers of nested lists in their order."""
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    else:
        yield value


def of_tokens(name: str) -> Tensor:
    """What the file has for each token of all answers [N] or [N, vocabulary]."""
    rows = [token for row in PEER[name] for token in row]
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


class Read:
    """What the heads read from the numbers of the file."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.leaves = {name: of_tokens(name) for name in ("logits", "v", *names)}

    def __call__(self, batch: PackedBatch, readout: Any) -> dict[str, Tensor]:
        def of_actions(values: Tensor) -> Tensor:
            return values.gather(1, batch.predict[:, None]).squeeze(1)

        leaves = self.leaves
        found = {"logprobs": of_actions(leaves["logits"].log_softmax(1)), "v": leaves["v"]}
        for name in self.names:
            found[name] = of_actions(leaves[name])
            found[f"cross_entropy/{name}"] = -of_actions(leaves[name].log_softmax(1)).sum()
            found[f"target_{name}"] = of_actions(of_tokens(f"target_{name}").detach())
        return found


@pytest.mark.parametrize(
    "case", PEER["losses"], ids=lambda case: f"tau {case['tau']} {case['beta']}"
)
def test_the_losses_and_their_gradients(case: Case) -> None:
    settings = ("tau", "gamma", "cql_scale", "awac_scale", "beta", "two_qs")
    config = ILQLConfig(**{name: case[name] for name in settings})
    trainer = ILQLTrainer(config, tokenizer=None)
    trainer.mean, trainer.deviation = 0.0, 1.0
    trainer.policy = read = Read(q_names(config))  # type: ignore[assignment]
    trainer.read = None  # type: ignore[assignment]
    answers = [Answer(row) for row in PEER["actions"]]
    batch = pack([Example([0], answers, {"reward": PEER["rewards"]})], [0])
    loss = trainer.loss(batch)
    value = weighted_loss(loss, {"tokens": float(TOKENS)})
    assert value.item() == pytest.approx(case["value"], abs=1e-6)
    for name in ("q", "v", "cql", "awac"):
        part, _ = loss.metrics[f"losses/loss_{name}"]  # type: ignore[misc]
        assert part.item() / TOKENS == pytest.approx(case["parts"][f"loss_{name}"], abs=1e-6)
    value.backward()
    for name, leaf in read.leaves.items():
        assert leaf.grad is not None
        slopes = list(numbers(case["gradient"][name]))
        assert leaf.grad.flatten().tolist() == pytest.approx(slopes, abs=1e-6), name
