"""Write what OpenRLHF and trlX compute for given numbers: tests/parity/ppo.json and ilql.json.

    python benchmarks/parity_ppo_ilql.py OPENRLHF TRLX tests/parity

OPENRLHF and TRLX are checkouts of both. Their functions are taken from their files by name, without
what these files import, so neither has to be installed. They run in float64. Numbers are multiples
of 1/1024, which float32 holds exactly.
"""

import ast
import dataclasses
import datetime
import functools
import json
import random
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LENGTHS = [3, 5, 2, 4]
LONGEST = max(LENGTHS)
SCORES = [1.5, -0.75, 3.0, 0.25]
VOCABULARY = 5
Data = dict[str, Any]
Settings = dict[str, Any]
REWARDS: Sequence[Settings] = (
    {"beta": 0.0, "clip": None},
    {"beta": 0.125, "clip": None},
    {"beta": 0.125, "clip": 1.0},
)
ADVANTAGES: Sequence[Settings] = (
    {"gamma": 1.0, "lambda": 0.95},
    {"gamma": 0.9, "lambda": 0.5},
    {"gamma": 1.0, "lambda": 1.0},
)
POLICY: Sequence[Settings] = (
    {"low": 0.2, "high": 0.2, "dual": None, "correction": None},
    {"low": 0.2, "high": 0.28, "dual": None, "correction": None},
    {"low": 0.2, "high": 0.2, "dual": 1.25, "correction": None},
    {"low": 0.2, "high": 0.2, "dual": None, "correction": ["tis", 0.0, 1.125]},
    {"low": 0.2, "high": 0.2, "dual": None, "correction": ["icepop", 0.875, 1.25]},
)
VALUE: Sequence[Settings] = ({"clip": 0.2}, {"clip": None})
KL: Sequence[Settings] = ({"kl": 9.0}, {"kl": 6.25}, {"kl": 1.0})
ILQL: Sequence[Settings] = (
    {"tau": 0.7, "gamma": 0.99, "cql_scale": 0.1, "awac_scale": 1.0, "beta": 0.0, "two_qs": True},
    {"tau": 0.9, "gamma": 0.8, "cql_scale": 0.4, "awac_scale": 1.3, "beta": 0.7, "two_qs": True},
    {"tau": 0.7, "gamma": 1.0, "cql_scale": 0.1, "awac_scale": 1.0, "beta": 1.0, "two_qs": False},
)


def main() -> None:
    openrlhf, trlx, folder = (Path(word) for word in sys.argv[1:])
    made = (
        "by benchmarks/parity_ppo_ilql.py, which calls functions of OpenRLHF and trlX on these "
        f"numbers in float64, {datetime.date.today()}"
    )
    draw = random.Random(0)
    data = numbers_of_ppo(draw)
    ppo = {
        "peers": "OpenRLHF 0.11.0 of 2026-08-13, trlX of 2024-01-09", "made": made, **data,
        "openrlhf": of_openrlhf(openrlhf / "openrlhf", data),
        "trlx": ppo_of_trlx(trlx / "trlx", data),
    }  # fmt: skip
    (folder / "ppo.json").write_text(json.dumps(ppo, indent=1) + "\n")
    data = numbers_of_ilql(draw)
    losses = ilql_of_trlx(trlx / "trlx", data)
    ilql = {"peer": "trlX of 2024-01-09", "made": made, **data, "losses": losses}
    (folder / "ilql.json").write_text(json.dumps(ilql, indent=1) + "\n")


def taken(file: Path, *names: str, **known: Any) -> list[Any]:
    """Return functions and classes of a file by name, which see nothing but `known`."""
    nodes = {getattr(node, "name", ""): node for node in ast.walk(ast.parse(file.read_text()))}
    space = {
        **vars(typing), "torch": torch, "nn": nn, "F": nn.functional, "np": np,
        "dataclass": dataclasses.dataclass, "reduce": functools.reduce, "MethodConfig": object,
        "register_method": lambda method: method, "TensorType": defaultdict(lambda: Any), **known,
    }  # fmt: skip
    for name in names:
        exec(compile(ast.Module([nodes[name]], []), str(file), "exec"), space)  # type: ignore[list-item]
    return [space[name] for name in names]


def number(draw: random.Random, low: float, high: float) -> float:
    return round(draw.uniform(low, high) * 1024) / 1024


def numbers_of_ppo(draw: random.Random) -> Data:
    """Return scores of answers, and log-probabilities, values, advantages and returns of their
    tokens."""

    def per_token(low: float, high: float) -> list[list[float]]:
        return [[number(draw, low, high) for _ in range(size)] for size in LENGTHS]

    data: Data = {"scores": SCORES, "now": per_token(-3.0, -0.6)}
    for kind in ("old", "drawn", "reference"):
        moves = per_token(-0.5, 0.5)
        data[kind] = [
            [a + b for a, b in zip(*pair, strict=True)]
            for pair in zip(data["now"], moves, strict=True)
        ]
    for kind in ("values", "values_before", "advantages", "returns"):
        data[kind] = per_token(-1.0, 1.0)
    return data


def matrix(rows: Sequence[Sequence[float]], *, grad: bool = False) -> Tensor:
    """Return numbers per token with 0 as padding [answers, T]."""
    padded = [[*row, *[0.0] * (LONGEST - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float64, requires_grad=grad)


def rows_of(values: Tensor) -> list[list[float]]:
    return [row[:size] for row, size in zip(values.tolist(), LENGTHS, strict=True)]


def of_openrlhf(folder: Path, data: Data) -> Data:
    (masked_mean, compute_reward) = taken(
        folder / "models" / "utils.py", "masked_mean", "compute_reward"
    )
    loss_file = folder / "models" / "loss.py"
    aggregate, policy, value = taken(
        loss_file, "aggregate_loss", "PolicyLoss", "ValueLoss", masked_mean=masked_mean
    )
    assert aggregate is not None
    maker = folder / "trainer" / "ppo_utils" / "experience_maker.py"
    (estimate,) = taken(maker, "get_advantages_and_returns")
    mask = matrix([[1.0] * size for size in LENGTHS])
    scores = torch.tensor(SCORES, dtype=torch.float64)
    kl = matrix(data["old"]) - matrix(data["reference"])

    def reward(case: Settings) -> Tensor:
        bounds = case["clip"] and (-case["clip"], case["clip"])
        found: Tensor = compute_reward(scores, case["beta"], kl, mask, bounds)
        return found

    def advantages(case: Settings) -> Settings:
        given = matrix(data["values_before"]), reward(REWARDS[1]), mask
        found = estimate(None, *given, case["gamma"], case["lambda"])
        return dict(zip(("advantages", "returns"), map(rows_of, found), strict=True))

    def policy_loss(case: Settings, now: Tensor) -> Tensor:
        kind, low, high = case["correction"] or ("tis", 0.0, 1.0)
        loss = policy(
            case["low"], case["high"], case["dual"], vllm_is_correction_type=kind,
            enable_vllm_is_correction=case["correction"] is not None,
            vllm_is_truncated_threshold=[low, high],
        )  # fmt: skip
        given = matrix(data["old"]), matrix(data["advantages"]), mask, matrix(data["drawn"])
        return loss(now, *given)[0]

    def value_loss(case: Settings, values: Tensor) -> Tensor:
        found: Tensor = value(case["clip"])(
            values, matrix(data["values_before"]), matrix(data["returns"]), mask
        )
        return found

    return {
        "rewards": [case | {"values": rows_of(reward(case))} for case in REWARDS],
        "advantages": [case | advantages(case) for case in ADVANTAGES],
        "policy": [case | slope(policy_loss, case, data["now"]) for case in POLICY],
        "value": [case | slope(value_loss, case, data["values"]) for case in VALUE],
    }


def slope(loss: Callable[[Settings, Tensor], Tensor], case: Settings, rows: Any) -> Settings:
    """Return a loss and its gradient for numbers per token."""
    leaf = matrix(rows, grad=True)
    value = loss(case, leaf)
    value.backward()
    assert leaf.grad is not None
    return {"value": value.item(), "gradient": rows_of(leaf.grad)}


def ppo_of_trlx(folder: Path, data: Data) -> Data:
    file = folder / "models" / "modeling_ppo.py"
    (whiten,) = taken(
        folder / "utils" / "modeling.py", "whiten",
        dist=SimpleNamespace(is_initialized=lambda: False),
    )  # fmt: skip
    config, control = taken(
        file, "PPOConfig", "AdaptiveKLController", whiten=whiten,
        get_tensor_stats=lambda *parts: {}, flatten_dict=lambda found: found,
    )  # fmt: skip
    mask = matrix([[1.0] * size for size in LENGTHS])

    def method(case: Settings) -> Any:
        fields = dict.fromkeys((each.name for each in dataclasses.fields(config)), 0.0)
        return config(**{**fields, "gen_kwargs": {}, **case})

    def advantages(case: Settings) -> Settings:
        """Of the longest answer, since padding counts in trlX."""
        longest = LENGTHS.index(LONGEST)
        values, rewards = (torch.tensor([data[name][longest]]) for name in ("values", "returns"))
        own = method({"gamma": case["gamma"], "lam": case["lambda"]})
        found = [
            own.get_advantages_and_returns(values.double(), rewards.double(), LONGEST, white)
            for white in (False, True)
        ]
        return {
            "advantages": found[0][0][0].tolist(), "returns": found[0][1][0].tolist(),
            "whitened": found[1][0][0].tolist(),
        }  # fmt: skip

    def adapted(case: Settings) -> float:
        own = control(0.2, 6.0, 10000)
        own.update(case["kl"], 256)
        return float(own.value)

    own = method({"cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.5})
    now, values = (matrix(data[name], grad=True) for name in ("now", "values"))
    given = (matrix(data[name]) for name in ("old", "values_before", "advantages", "returns"))
    loss, _ = own.loss(now, values, *given, mask)
    loss.backward()
    assert now.grad is not None
    assert values.grad is not None
    whole = {"value": loss.item(), "now": rows_of(now.grad), "values": rows_of(values.grad)}
    return {
        "advantages": [case | advantages(case) for case in ADVANTAGES],
        "adapted": [case | {"beta": adapted(case)} for case in KL],
        "loss": {"vf_coef": 0.5, **whole},
    }


def numbers_of_ilql(draw: random.Random) -> Data:
    """Return logits and values of Q heads per token of the vocabulary, V, actions and rewards."""

    def per_token(width: int) -> list[list[list[float]]]:
        return [
            [[number(draw, -2.0, 2.0) for _ in range(width)] for _ in range(size)]
            for size in LENGTHS
        ]

    kinds = ("logits", "q0", "q1", "target_q0", "target_q1")
    data: Data = {kind: per_token(VOCABULARY) for kind in kinds}
    data["v"] = [[value for (value,) in row] for row in per_token(1)]
    data["actions"] = [[draw.randrange(VOCABULARY) for _ in range(size)] for size in LENGTHS]
    return data | {"rewards": SCORES}


def ilql_of_trlx(folder: Path, data: Data) -> list[Data]:
    gather, config = taken(
        folder / "models" / "modeling_ilql.py", "batched_index_select", "ILQLConfig",
        ILQLBatch=SimpleNamespace, get_tensor_stats=lambda *parts: {},
        flatten_dict=lambda found: found,
    )  # fmt: skip
    assert gather is not None

    def padded(name: str, *, more: int = 0) -> Tensor:
        """Numbers per token of the vocabulary, or per token, with 0 as padding and for `more`
        tokens."""
        whole = torch.zeros(len(LENGTHS), LONGEST + more, *np.shape(data[name][0][0]))
        for place, row in enumerate(data[name]):
            whole[place, : len(row)] = torch.tensor(row)
        return whole.double().requires_grad_()

    actions = padded("actions").detach().long()
    rewards = torch.zeros(len(LENGTHS), LONGEST)
    dones = torch.zeros(len(LENGTHS), LONGEST + 1)
    for place, (size, reward) in enumerate(zip(LENGTHS, data["rewards"], strict=True)):
        rewards[place, size - 1] = reward
        dones[place, :size] = 1
    labels = SimpleNamespace(
        # Action t is token t + 1; the prompt is one token.
        input_ids=torch.cat([torch.zeros(len(LENGTHS), 1, dtype=torch.long), actions], 1),
        actions_ixs=torch.arange(LONGEST).expand(len(LENGTHS), -1),
        rewards=rewards.double(), dones=dones.double(),
    )  # fmt: skip
    cases = []
    for case in ILQL:
        names = ["q0", "q1"][: 1 + case["two_qs"]]
        leaves = {name: padded(name) for name in ("logits", *names)} | {"v": padded("v", more=1)}
        targets = [padded(f"target_{name}") for name in names]
        own = config(**case, alpha=0.0, steps_for_target_q_sync=1, gen_kwargs={})
        read = [leaves[name] for name in names], targets, leaves["v"][:, :, None]
        loss, stats = own.loss((leaves["logits"], read), labels)
        loss.backward()
        slopes = {name: rows_of(leaf.grad) for name, leaf in leaves.items()}  # type: ignore[arg-type]
        cases.append({**case, "value": loss.item(), "parts": stats["losses"], "gradient": slopes})
    return cases


if __name__ == "__main__":
    main()
