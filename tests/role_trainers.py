"""Trainers of several models, and of modules that are no language models."""

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.readouts import Head, answer_logprobs, scores, token_logprobs
from rlhf.trainer import Average, Loss, Run, Term, Trainer


class CriticTrainer(Trainer):
    """A policy and a critic that learns the policy's log-probability of each answer."""

    row_format = "demonstration"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")
        optim = attrs.evolve(run.config.optim, lr=3e-3, clip=0.2)
        self.critic = run.load("critic", task="sequence", optim=optim)

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, answer_logprobs)["logprobs"]
        error = self.critic(batch, scores)["scores"] - logprobs.detach() / 50
        weights = torch.sigmoid(error.detach())
        return Loss(
            (
                Term(-(weights * logprobs).sum(), "answers"),
                Term(error.square().sum(), "answers", weight=0.5, role="critic"),
            ),
            {"error": (error.detach().abs().sum(), "answers")},
        )


class AloneTrainer(CriticTrainer):
    """A policy without a critic."""

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")

    def loss(self, batch: PackedBatch) -> Loss:
        return Loss((Term(-self.policy(batch, token_logprobs)["logprobs"].sum(), "tokens"),))


class MovingTrainer(AloneTrainer):
    """A policy without a critic, and a reference that follows it."""

    def setup(self, run: Run) -> None:
        super().setup(run)
        self.reference = run.reference("engine", every=1, mix=0.5)

    def loss(self, batch: PackedBatch) -> Loss:
        known = self.reference.answer_logprobs(batch)
        logprobs = self.policy(batch, answer_logprobs)["logprobs"]
        return Loss((Term((logprobs - known).square().sum(), "answers"),))


class AverageTrainer(AloneTrainer):
    """A policy with a large parameter of its own, and a moving average of it."""

    def setup(self, run: Run) -> None:
        first = torch.zeros(1000, 1000)
        slow = Average(first, of="fast", share=0.5, every=1)
        self.policy = run.load("policy", extra={"fast": first, "slow": slow})


class RoundedCriticTrainer(CriticTrainer):
    """A critic whose states have another precision than the policy's."""

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")
        optim = attrs.evolve(run.config.optim, states="bf16")
        self.critic = run.load("critic", task="sequence", optim=optim)


class BrokenCriticTrainer(CriticTrainer):
    """A critic's loss of zero whose gradient is not a number."""

    def loss(self, batch: PackedBatch) -> Loss:
        values = self.critic(batch, scores)["scores"]
        policy, _ = super().loss(batch).terms
        return Loss((policy, Term((0 * values).sqrt().sum(), "answers", role="critic")))


class TangledTrainer(CriticTrainer):
    """A critic's loss that reaches the policy's weights."""

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, answer_logprobs)["logprobs"]
        error = self.critic(batch, scores)["scores"] - logprobs
        return Loss((Term(-logprobs.sum(), "answers"), Term(error.sum(), "answers", role="critic")))


class ForgetfulTrainer(CriticTrainer):
    """A critic without a loss."""

    loss = AloneTrainer.loss


class OrdinalTrainer(CriticTrainer):
    """Scores of three labels against thresholds of its own: a vector, a matrix and a scalar."""

    def setup(self, run: Run) -> None:
        extra = {
            "thresholds": torch.tensor([-1.0, 0.0, 1.0]),
            "mixing": torch.eye(3),
            "scale": torch.ones(1),
        }
        self.policy = run.load("policy", task="sequence", labels=3, extra=extra)

    def loss(self, batch: PackedBatch) -> Loss:
        odds = self.policy(batch, against_thresholds)["odds"]
        ones = torch.ones_like(batch.answer, dtype=torch.float32)
        lengths = odds.new_zeros(len(odds)).index_add(0, batch.answer, ones)
        right = (lengths[:, None] % 3 > torch.arange(3)).float()
        losses = nn.functional.binary_cross_entropy_with_logits(odds, right, reduction="none")
        return Loss((Term(losses.sum(), "answers"),))


def against_thresholds(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
    """Read the distance of each answer's scores [A, 3] from the thresholds."""
    own = {name: value.float() for name, value in head.extra.items()}
    found = scores(hidden, head, batch)["scores"] @ own["mixing"]
    return {"odds": own["scale"] * found - own["thresholds"]}


class Bigrams(nn.Module):
    """Predicts a token from the one before, with one matrix for both ends."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        """tokens [N], targets [N] -> the cross entropy of each [N]."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(
            self.head(hidden * self.scale), targets, reduction="none"
        )


class BigramTrainer(CriticTrainer):
    """Two modules of its own: what is trained, and a frozen one whose loss it must not exceed."""

    def setup(self, run: Run) -> None:
        size = len(self.tokenizer)
        self.policy = run.prepare(Bigrams(size), "policy")
        self.frozen = run.prepare(Bigrams(size), "frozen", trained=False)

    def loss(self, batch: PackedBatch) -> Loss:
        given = batch.tokens[batch.predict_from]
        losses = self.policy(given, targets=batch.predict)
        with torch.no_grad():
            others = self.frozen(given, targets=batch.predict)
        return Loss((Term((losses - 0.5 * others).sum(), "tokens"),))


class JudgedTrainer(CriticTrainer):
    """A policy whose gradient comes through a frozen module, as from a differentiable reward."""

    def setup(self, run: Run) -> None:
        self.policy = run.load("policy")
        torch.manual_seed(0)
        judge = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.judge = run.prepare(judge, "judge", trained=False)

    def loss(self, batch: PackedBatch) -> Loss:
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term(self.judge(logprobs[:, None]).sum(), "tokens"),))
