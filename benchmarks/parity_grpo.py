"""Write what TRL's GRPOTrainer computes for given answers: tests/parity/grpo.json.

    python benchmarks/parity_grpo.py tests/parity/grpo.json

Needs TRL 1.16 in the environment, and no model: TRL's own methods get the token ids, rewards and
log-probabilities of three groups in float64, and return advantages, the loss, and its gradient for
each log-probability of the policy. Numbers are multiples of 1/1024, which float32 holds exactly.
"""

import datetime
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

GROUPS, ANSWERS, LONGEST = 3, 3, 6
PAD, END = 0, 1
LENGTHS = [[3, 6, 2], [4, 1, 5], [6, 2, 3]]
"""Answers of the largest length are cut."""
FIRST = [[1.0, 0.0, 0.5], [None, 2.0, -1.0], [0.25, 0.25, 0.25]]
SECOND = [[0.5, None, -1.5], [-0.5, 0.25, 1.0], [1.0, 1.0, 1.0]]
"""The rewards of two functions."""
UNSCORABLE = 3
"""The answer that has no reward in the cases `unscorable`."""
WEIGHTS = [1.0, 0.5]
KINDS = ("now", "old", "drawn", "reference")
Data = dict[str, Any]
Settings = dict[str, Any]
SCALES = ("group", "batch", "none")
DEFAULTS: Settings = {
    "loss_type": "dapo", "importance_sampling_level": "token", "scale_rewards": "group",
    "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": None, "beta": 0.0,
    "use_bias_correction_kl": True, "mask_truncated_completions": False, "correction": None,
    "entropy_coef": 0.0, "unscorable": False,
    "multi_objective_aggregation": "sum_then_normalize",
}  # fmt: skip
LOSSES: Sequence[Settings] = (
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dapo"},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "cispo", "epsilon_high": 1.25},
    {"loss_type": "dapo", "scale_rewards": "batch"},
    {"loss_type": "grpo", "beta": 0.5},
    {"loss_type": "dapo", "beta": 0.5},
    {"loss_type": "dapo", "beta": 0.5, "use_bias_correction_kl": False},
    {"loss_type": "grpo", "beta": 0.5, "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "delta": 1.5},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03,
     "epsilon_high": 0.04},
    {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.05},
    {"loss_type": "dapo", "mask_truncated_completions": True},
    {"loss_type": "grpo", "mask_truncated_completions": True},
    {"loss_type": "dr_grpo", "mask_truncated_completions": True},
    {"loss_type": "dapo", "correction": ["token_truncate", None, 1.25]},
    {"loss_type": "dapo", "correction": ["token_mask", 0.75, 1.25], "beta": 0.5},
    {"loss_type": "dapo", "correction": ["sequence_truncate", None, 1.25]},
    {"loss_type": "dapo", "correction": ["sequence_mask", 0.75, 1.5], "beta": 0.5},
    {"loss_type": "grpo", "correction": ["sequence_mask", None, 1.25]},
    {"loss_type": "dapo", "entropy_coef": 0.25},
    {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
    {"loss_type": "dapo", "unscorable": True},
    {"loss_type": "grpo", "unscorable": True},
)  # fmt: skip


def main() -> None:
    data, cases = made(), []
    given = [
        {"scale_rewards": scale, "unscorable": each} for each in (False, True) for scale in SCALES
    ] + [
        {"multi_objective_aggregation": "normalize_then_sum", "unscorable": each}
        for each in (False, True)
    ]
    for case in LOSSES:
        settings = DEFAULTS | case
        inputs, trainer = prepared(data, settings)
        cases.append(case | loss_of(trainer, inputs, data, slice(None)))
    result = {
        "peer": f"trl {version('trl')}",
        "made": "by benchmarks/parity_grpo.py, which calls methods of TRL's GRPOTrainer on these "
        f"numbers in float64, {datetime.date.today()}",
        **data,
        "defaults": DEFAULTS,
        "unscorable": UNSCORABLE,
        "advantages": [each | {"values": advantages(data, each)} for each in given],
        "losses": cases,
        "two_steps": two_steps(data),
        "micro_batches": micro_batches(data),
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


def made() -> Data:
    """Return token ids, rewards, and log-probabilities and entropies per token."""
    draw = random.Random(0)

    def numbers(low: float, high: float) -> list[list[list[float]]]:
        return [
            [[round(draw.uniform(low, high) * 1024) / 1024 for _ in range(size)] for size in group]
            for group in LENGTHS
        ]

    data: Data = {"now": numbers(-3.0, -0.1), "weights": WEIGHTS, "rewards": [FIRST, SECOND]}
    for kind in KINDS[1:]:
        moved = numbers(-0.5, 0.5)
        data[kind] = [
            [[min(a + b, 0.0) for a, b in zip(*pair, strict=True)]
             for pair in zip(*groups, strict=True)]
            for groups in zip(data["now"], moved, strict=True)
        ]  # fmt: skip
    data["entropies"] = numbers(0.1, 2.0)
    data["answers"] = [
        [[draw.randrange(2, 9) for _ in range(size - 1)] + [8 if size == LONGEST else END]
         for size in group]
        for group in LENGTHS
    ]  # fmt: skip
    return data


def flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [answer for group in groups for answer in group]


def padded(groups: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    """Return values per token as [answers, tokens]."""
    rows = [torch.tensor(answer, dtype=torch.float64) for answer in flat(groups)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def prepared(data: Data, settings: Settings) -> tuple[dict[str, Any], Any]:
    """Return what TRL makes of the answers of a rollout, and the trainer that has made it."""
    trainer = trainer_of(data, settings)
    method = GRPOTrainer._generate_and_score_completions
    return method(trainer, [{"prompt": "x"}] * GROUPS * ANSWERS), trainer


def trainer_of(data: Data, settings: Settings) -> Any:
    """Return an object with what TRL's methods read of a trainer."""
    correction = settings["correction"] or ("token_truncate", None, 3.0)
    policy = SimpleNamespace(training=True, of="old", is_gradient_checkpointing=False)
    trainer = SimpleNamespace(
        model=policy, ref_model=SimpleNamespace(of="reference"), environment_factories=None,
        environments=None, tools=None, pad_to_multiple_of=None, eos_token_ids=[END],
        _tokenizer=SimpleNamespace(pad_token_id=PAD), num_generations=ANSWERS,
        num_generations_eval=ANSWERS, num_iterations=2, log_multimodal=False,
        reward_funcs=["first", "second"], reward_func_names=["first", "second"],
        max_completion_length=LONGEST,
        reward_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
        current_gradient_accumulation_steps=1, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        use_adaptive_entropy=False, use_vllm=settings["correction"] is not None,
        vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=correction[0],
        vllm_importance_sampling_clip_min=correction[1],
        vllm_importance_sampling_clip_max=correction[2],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _pending_extra_logs={}, _pending_metrics={},
        **{name: settings[name] for name in (
            "loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta",
            "mask_truncated_completions", "scale_rewards", "entropy_coef",
            "multi_objective_aggregation",
        )},
    )  # fmt: skip
    trainer.args = SimpleNamespace(
        per_device_train_batch_size=GROUPS * ANSWERS, steps_per_generation=1,
        gradient_accumulation_steps=1, gradient_checkpointing_kwargs=None,
        delta=settings["delta"], use_bias_correction_kl=settings["use_bias_correction_kl"],
    )  # fmt: skip
    trainer.accelerator = SimpleNamespace(
        device="cpu", num_processes=1, process_index=0, sync_gradients=True,
        gather=lambda value: value, reduce=lambda value, reduction: value,
    )  # fmt: skip
    ids = flat(data["answers"])
    drawn = flat(data["drawn"]) if trainer.use_vllm else None
    trainer._generate = lambda prompts: (
        [[2]] * len(ids), ids, None, [""] * len(ids), drawn, {}, None, None
    )  # fmt: skip
    columns = [[float("nan") if x is None else x for x in flat(each)] for each in data["rewards"]]
    rewards = torch.tensor(columns, dtype=torch.float64).T
    if settings["unscorable"]:
        rewards[UNSCORABLE] = float("nan")
    trainer._calculate_rewards = lambda *given: rewards

    def read(model: Any, *given: Any, **more: Any) -> tuple[Tensor, Tensor, None]:
        logprobs = model.logprobs if hasattr(model, "logprobs") else padded(data[model.of])
        entropies = model.entropies if hasattr(model, "entropies") else padded(data["entropies"])
        return logprobs, entropies, None

    trainer._get_per_token_logps_and_entropies = read
    return trainer


def advantages(data: Data, settings: Settings) -> list[float]:
    inputs, _ = prepared(data, DEFAULTS | settings)
    values: list[float] = inputs["advantages"].tolist()
    return values


def loss_of(trainer: Any, inputs: dict[str, Any], data: Data, part: slice) -> dict[str, Any]:
    """Return the loss of the answers of `part`, and its gradient for each log-probability."""
    chosen = {
        name: value[part] if value.dim() else value
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }
    leaf = padded(data["now"])[part].requires_grad_()
    entropies = padded(data["entropies"])[part].requires_grad_()
    model = SimpleNamespace(logprobs=leaf, entropies=entropies)
    loss = GRPOTrainer._compute_loss(trainer, model, chosen)
    loss.backward()
    assert leaf.grad is not None
    lengths = [len(answer) for answer in flat(data["now"])[part]]
    found = zip(leaf.grad.tolist(), lengths, strict=True)
    return {"value": loss.item(), "gradient": [row[:size] for row, size in found]}


def two_steps(data: Data) -> dict[str, Any]:
    """Return the losses of two optimizer steps of one generation: one group, then two."""
    inputs, trainer = prepared(data, DEFAULTS)
    trainer.args.steps_per_generation = 2
    parts = slice(0, ANSWERS), slice(ANSWERS, None)
    return {"values": [loss_of(trainer, inputs, data, part)["value"] for part in parts]}


def micro_batches(data: Data) -> dict[str, Any]:
    """Return the loss of one step of two micro-batches, one group and then two, by loss type."""
    found = {}
    for name in ("bnpo", "dapo"):
        inputs, trainer = prepared(data, DEFAULTS | {"loss_type": name})
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 2
        parts = slice(0, ANSWERS), slice(ANSWERS, None)
        found[name] = sum(loss_of(trainer, inputs, data, part)["value"] for part in parts)
    return found


if __name__ == "__main__":
    main()
