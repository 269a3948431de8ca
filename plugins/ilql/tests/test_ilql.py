"""Implicit language Q-learning against numbers worked by hand and against all logits at once."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.errors import RLHFError
from rlhf.readouts import Head
from rlhf.trainer import Answer, Average, Example
from rlhf_devkit import pack, weighted_loss
from rlhf_plugin_ilql.config import ILQLConfig
from rlhf_plugin_ilql.heads import first_values
from rlhf_plugin_ilql.losses import expectile, last_predictions, next_values
from rlhf_plugin_ilql.trainer import ILQLTrainer, reward_scale

WIDTH, VOCABULARY = 4, 5
ROWS = [
    Example([1, 2], [Answer([3, 0, 4]), Answer([2, 4])], {"reward": [2.0, -1.0]}),
    Example([0], [Answer([1, 3, 4, 2], [True, False, True, True])], {"reward": [0.5]}),
]


def test_only_the_last_prediction_of_an_answer_ends_it() -> None:
    answer = torch.tensor([0, 0, 0, 1, 2, 2])
    assert last_predictions(answer).tolist() == [False, False, True, True, False, True]
    assert last_predictions(answer[:0]).tolist() == []


def test_the_value_after_the_last_token_is_zero() -> None:
    v = torch.tensor([1.0, 2.0, 3.0])
    last = torch.tensor([False, True, True])
    assert next_values(v, last).tolist() == [2.0, 0.0, 0.0]


def test_an_expectile_weighs_what_is_above_it_by_tau() -> None:
    q, v = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    losses = expectile(q, v, 0.7)
    # 0.7 x 2^2 and 0.3 x 2^2; the slopes are -2 x 0.7 x 2 and 2 x 0.3 x 2.
    assert losses.tolist() == pytest.approx([2.8, 1.2, 0.0])
    losses.sum().backward()
    assert v.grad is not None
    assert v.grad.tolist() == pytest.approx([-2.8, 1.2, 0.0])


def heads(config: ILQLConfig, *, seed: int = 0, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """The parameters of all heads, with targets that differ from their sources."""
    values = first_values(config, width=WIDTH, vocabulary=vocabulary, seed=seed, meta=False)
    torch.manual_seed(seed)
    return {
        name: item.value + 0.3 * torch.randn_like(item.value)
        if isinstance(item, Average)
        else item.clone().requires_grad_()
        for name, item in values.items()
    }


def losses_of(
    config: ILQLConfig, rows: list[Example], hidden: Tensor, weight: Tensor, extra: Any
) -> dict[str, Any]:
    """The trainer's loss over the whole of `rows`, with mean 0.25 and deviation 2 of rewards."""
    trainer = ILQLTrainer(config, tokenizer=None)
    run: Any = SimpleNamespace(
        examples=[SimpleNamespace(
            counts={"answers": np.array([2])},
            value={"mean": np.array([0.25]), "squares": np.array([4.0])}.__getitem__,
        )],
        notes=[], device=torch.device("cpu"), config=SimpleNamespace(
            train=SimpleNamespace(seed=0)
        ),
        load_architecture=lambda: SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(hidden_size=WIDTH, vocab_size=VOCABULARY)
        ),
        load=lambda role, **_: lambda batch, readout: readout(
            hidden, Head(weight=weight, extra=extra), batch
        ),
    )  # fmt: skip
    trainer.setup(run)
    batch = pack(rows, range(len(rows)))
    loss = trainer.loss(batch)
    count = len(batch.predict)
    metrics = {name: (value.item() / count) for name, (value, _) in loss.metrics.items()}
    return {"loss": weighted_loss(loss, {"tokens": count}), **metrics}


def dense(
    config: ILQLConfig, rows: list[Example], hidden: Tensor, weight: Tensor, extra: Any
) -> Tensor:
    """The same loss answer by answer, from all logits, as trlX writes it."""

    def head(name: str, states: Tensor) -> Tensor:
        first, bias, last, last_bias = (
            extra[f"{name}_{part}"] for part in ("in_weight", "in_bias", "out_weight", "out_bias")
        )
        return (states @ first.T + bias).relu() @ last.T + last_bias

    names, total, count, start = ["q0", "q1"][: 1 + config.two_qs], torch.zeros(()), 0, 0
    for row in rows:
        prompt, before = len(row.prompt), start + len(row.prompt)
        for answer, reward in zip(row.answers, row.values["reward"], strict=True):
            places = [start + prompt - 1, *range(before, before + len(answer.tokens) - 1)]
            kept = [place for place, one in enumerate(answer.trained or [True] * 9)][: len(places)]
            kept = [place for place in kept if answer.trained is None or answer.trained[place]]
            states = hidden[[places[place] for place in kept]]
            actions = torch.tensor([answer.tokens[place] for place in kept])
            take = actions[:, None]
            v = head("v", states).squeeze(-1)
            rewards = torch.zeros(len(kept))
            rewards[-1] = (reward - 0.25) / 2.0
            goal = rewards + config.gamma * torch.cat([v[1:], torch.zeros(1)]).detach()
            targets = [head(f"target_{name}", states).gather(1, take)[:, 0] for name in names]
            target = torch.stack(targets).amin(0).detach()
            above = (target >= v).float()
            loss_v = (above * config.tau + (1 - above) * (1 - config.tau)) * (target - v) ** 2
            loss = loss_v.sum()
            for name in names:
                q = head(name, states)
                loss = loss + ((q.gather(1, take)[:, 0] - goal) ** 2).sum()
                loss = loss + config.cql_scale * cross_entropy(q, actions, reduction="sum")
            weights = torch.exp(config.beta * (target - v)).detach()
            policy = cross_entropy(states @ weight.T, actions, reduction="none")
            total = total + loss + config.awac_scale * (policy * weights).sum()
            count += len(kept)
            before += len(answer.tokens)
        start = before
    return total / count


@pytest.mark.parametrize(
    "config",
    [
        ILQLConfig(),
        ILQLConfig(beta=0.7, tau=0.9, gamma=0.8, cql_scale=0.4, awac_scale=1.3),
        ILQLConfig(two_qs=False, beta=1.0),
    ],
)
@pytest.mark.parametrize("rows_at_once", [1, 3, 2048])
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    config: ILQLConfig, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.readouts.logits.LOGIT_ROWS", rows_at_once)
    torch.manual_seed(1)
    size = len(pack(ROWS, [0, 1]).tokens)
    hidden, weight = torch.randn(size, WIDTH), torch.randn(VOCABULARY, WIDTH)
    found = gradients(
        lambda *parts: losses_of(config, ROWS, *parts)["loss"], hidden, weight, config
    )
    expected = gradients(lambda *parts: dense(config, ROWS, *parts), hidden, weight, config)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6, rtol=1e-5), name


def gradients(
    loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, config: ILQLConfig
) -> dict[str, Tensor]:
    """The loss, and its gradients for hidden states, weight and heads."""
    extra = heads(config)
    leaves = {"hidden": hidden.clone(), "weight": weight.clone()}
    for value in leaves.values():
        value.requires_grad_()
    total = loss(leaves["hidden"], leaves["weight"], extra)
    total.backward()
    leaves |= {name: value for name, value in extra.items() if value.requires_grad}
    grads = {name: value.grad for name, value in leaves.items()}
    return {"loss": total.detach(), **{n: g for n, g in grads.items() if g is not None}}


def test_targets_have_no_gradient_and_metrics_are_means_over_tokens() -> None:
    config = ILQLConfig(cql_scale=0.4, awac_scale=1.3)
    torch.manual_seed(1)
    size = len(pack(ROWS, [0, 1]).tokens)
    hidden, weight = torch.randn(size, WIDTH), torch.randn(VOCABULARY, WIDTH)
    found = losses_of(config, ROWS, hidden, weight, heads(config))
    parts = [found[f"losses/loss_{name}"] for name in ("q", "v", "cql", "awac")]
    whole = parts[0] + parts[1] + 0.4 * parts[2] + 1.3 * parts[3]
    assert found["loss"].item() == pytest.approx(whole)
    difference = found["target_qvalues/mean"] - found["values/mean"]
    assert found["advantages/mean"] == pytest.approx(difference)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_no_tensor_has_the_size_of_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.readouts.logits.LOGIT_ROWS", 2)
    vocabulary, config = 1000, ILQLConfig()
    rows = [Example([1], [Answer([2] * 40)], {"reward": [1.0]})]
    hidden, weight = torch.randn(48, WIDTH), torch.randn(vocabulary, WIDTH)
    values = heads(config, vocabulary=vocabulary)
    with Largest() as largest:
        losses_of(config, rows, hidden.requires_grad_(), weight, values)["loss"].backward()
    # The gradient of a head, whose hidden layer is twice as wide as the model.
    assert largest.numel == vocabulary * 2 * WIDTH


def rewards(*rows: list[float]) -> Any:
    """Examples that have only rewards."""
    trainer = ILQLTrainer(ILQLConfig(), tokenizer=None)
    made = [
        trainer.example(
            SimpleNamespace(prompt=[1], answers=[Answer([2])] * len(row), columns={"rewards": row})
        ).values
        for row in rows
    ]
    return SimpleNamespace(
        counts={"answers": np.array([len(row) for row in rows])},
        value=lambda name: np.array([one[name] for one in made], np.float32),
    )


def test_rewards_are_normalised_over_all_answers() -> None:
    rows = [[1001.0, 1000.0, 1000.0], [1003.0], [1000.0, 1002.0]]
    mean, deviation = reward_scale(rewards(*rows))
    flat = torch.tensor([reward for row in rows for reward in row], dtype=torch.float64)
    assert mean == pytest.approx(flat.mean().item())
    # An example keeps them in float32.
    assert deviation == pytest.approx(flat.std().item(), rel=1e-5)


@pytest.mark.parametrize("rows", [[[0.1, 0.1], [0.1]], [[0.1]]])
def test_equal_rewards_are_an_error(rows: list[list[float]]) -> None:
    with pytest.raises(RLHFError) as error:
        reward_scale(rewards(*rows))
    assert str(error.value) == (
        "data.train: every reward is 0.1, so no answer is better than another; give rewards that "
        "differ"
    )
