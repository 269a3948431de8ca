"""Implicit language Q-learning: offline RL from answers with rewards (arXiv 2206.11871).

The losses are trlX's. Departures from it: each sum is divided by the tokens of the whole optimizer
step on all ranks; rewards are normalised by the training rows, and held-out ones by the same mean
and deviation; target heads are in float32 in a run of any precision.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.trainer import Example, Examples, Loss, PackedBatch, Run, Term, Trainer
from rlhf_plugin_ilql.heads import TARGET, first_values, q_names, read_heads
from rlhf_plugin_ilql.losses import expectile, last_predictions, next_values


class ILQLTrainer(Trainer):
    row_format = "rewarded"

    def example(self, row: Any) -> Example:
        rewards = np.array(row.columns["rewards"])
        own = {"mean": float(rewards.mean()), "squares": float(rewards.var() * len(rewards))}
        return Example(row.prompt, row.answers, {**own, "reward": rewards.tolist()})

    def setup(self, run: Run) -> None:
        self.mean, self.deviation = reward_scale(run.examples[0])
        run.notes.append(
            f"rewards    mean {self.mean:.4g} and deviation {self.deviation:.4g} over the training "
            "answers become 0 and 1"
        )
        text = run.load_architecture().get_text_config()
        heads = first_values(
            self.config,
            width=text.hidden_size,
            vocabulary=text.vocab_size,
            seed=run.config.train.seed,
            meta=run.device.type == "meta",
        )
        self.policy = run.load("policy", extra=heads, dropout=False)
        self.read = partial(read_heads, names=q_names(self.config))

    def loss(self, batch: PackedBatch) -> Loss:
        config, names = self.config, q_names(self.config)
        found = self.policy(batch, self.read)
        v, last = found["v"], last_predictions(batch.answer)
        rewards = (batch.values["reward"] - self.mean) / self.deviation
        at_end = rewards.index_select(0, batch.answer).masked_fill(~last, 0.0)
        goal = at_end + config.gamma * next_values(v.detach(), last)
        target = torch.stack([found[TARGET + name] for name in names]).amin(0)
        advantage = target - v.detach()
        parts: dict[str, tuple[Tensor, float]] = {
            "q": (sum_of((found[name] - goal).square() for name in names), 1.0),
            "v": (expectile(target, v, config.tau).sum(), 1.0),
            "cql": (sum_of(found[f"cross_entropy/{name}"] for name in names), config.cql_scale),
            "awac": (
                -((config.beta * advantage).exp() * found["logprobs"]).sum(),
                config.awac_scale,
            ),
        }
        means = {"values": v, "target_qvalues": target, "advantages": advantage}
        means |= {f"qvalues/{name[1:]}": found[name] for name in names}
        return Loss(
            tuple(Term(value, per="tokens", weight=weight) for value, weight in parts.values()),
            {f"losses/loss_{name}": (value, "tokens") for name, (value, _) in parts.items()}
            | {f"{name}/mean": (value.sum(), "tokens") for name, value in means.items()},
        )


def sum_of(parts: Any) -> Tensor:
    """Return the sum of all numbers of several tensors."""
    return torch.stack([part.sum() for part in parts]).sum()


def reward_scale(examples: Examples) -> tuple[float, float]:
    """Return the mean and the deviation (with n - 1, as trlX's) of the rewards of all answers.
    Raises RLHFError if they are equal."""
    answers = examples.counts["answers"]
    means, squares = (examples.value(name).astype(float) for name in ("mean", "squares"))
    total = int(answers.sum())
    mean = float((means * answers).sum() / total)
    square = float((squares + answers * (means - mean) ** 2).sum() / max(total - 1, 1))
    # Examples keep their means in float32.
    if square <= (1e-6 * mean) ** 2:
        raise RLHFError(
            f"data.train: every reward is {mean:g}, so no answer is better than another; give "
            "rewards that differ"
        )
    return mean, square**0.5
