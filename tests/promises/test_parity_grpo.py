"""The same advantages, losses and gradients as TRL on the same answers, rewards and
log-probabilities, to 1e-6.

`parity/grpo.json` holds what TRL's GRPOTrainer computed for the numbers that stand beside it;
`benchmarks/parity_grpo.py` writes it. Where TRL is wrong, or where we differ on purpose, a test
says how.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlhf.config.sections import Config
from rlhf.trainer import Example, Loss, PackedBatch, Sample
from rlhf_devkit import pack, weighted_loss
from rlhf_plugin_grpo.answers import Judged, gains_of, trees
from rlhf_plugin_grpo.config import KL, Clip, GRPOConfig
from rlhf_plugin_grpo.trainer import GRPOTrainer
from rlhf_rollouts.reported import Reported
from rlhf_rollouts.rewards import RewardSpec, Scores
from rlhf_rollouts.settings import Correction

PEER = json.loads((Path(__file__).parents[1] / "parity" / "grpo.json").read_text())
LENGTHS = np.array([[len(answer) for answer in group] for group in PEER["answers"]])
LONGEST = int(LENGTHS.max())
NUM_CUT = int((LENGTHS == LONGEST).sum())
"""Answers that are cut."""
PER = {"grpo": "answers", "dr_grpo": "constant", "bnpo": "tokens", "dapo": "tokens",
       "cispo": "tokens"}  # fmt: skip
Case = Mapping[str, Any]


def rewards_of(case: Case) -> dict[str, Any]:
    """The rewards of both functions [groups, answers], nan without one."""
    values = np.array(PEER["rewards"], dtype=np.float64)
    if case["unscorable"]:
        values.reshape(2, -1)[:, PEER["unscorable"]] = np.nan
    return dict(zip(("first", "second"), values, strict=True))


def judged_of(case: Case) -> Judged:
    by_name = {name: values.ravel() for name, values in rewards_of(case).items()}
    weighted = [w * each for w, each in zip(PEER["weights"], by_name.values(), strict=True)]
    total = np.nansum(weighted, axis=0)
    total[np.isnan(weighted).all(0)] = np.nan
    groups = [
        [Sample(tokens, logprobs, finished=len(tokens) < LONGEST)
         for tokens, logprobs in zip(*pair, strict=True)]
        for pair in zip(PEER["answers"], drawn_of(case), strict=True)
    ]  # fmt: skip
    weights = dict(zip(by_name, PEER["weights"], strict=True))
    return Judged.of(groups, Scores(by_name, total, {}, {}, weights))


def drawn_of(case: Case) -> Any:
    """The log-probabilities with which answers were drawn: TRL compares with them only if vLLM has
    written the answers."""
    return PEER["drawn"] if case["correction"] else PEER["old"]


def config_of(case: Case) -> GRPOConfig:
    """Our settings for those of TRL."""
    sequence = case["importance_sampling_level"] == "sequence"
    clip = Clip(kind="ppo", low=case["epsilon_low"], high=case["epsilon_high"], dual=case["delta"])
    if case["loss_type"] == "cispo":
        # TRL's bound is that of the ratio itself.
        clip = Clip(kind="cispo", high=case["epsilon_high"] - 1)
    correction = Correction(kind="none")
    if case["correction"]:
        mode, low, high = case["correction"]
        level, kind = mode.split("_")
        masks: Any = {"low": low or 0.0} if kind == "mask" else {}
        correction = Correction(kind=kind, level=level, high=high, **masks)
    return GRPOConfig(
        rewards=(RewardSpec(function="exact", name="first"),
                 RewardSpec(function="exact", name="second", weight=0.5)),
        answers=LENGTHS.shape[1], max_new_tokens=LONGEST, advantage="mean",
        scale=case["scale_rewards"], aggregation=case["multi_objective_aggregation"],
        ratio="sequence" if sequence else "token", clip=clip,
        per=PER[case["loss_type"]],  # type: ignore[arg-type]
        kl=KL(beta=case["beta"]), correction=correction, filter="none", passes=2,
        truncated="mask" if case["mask_truncated_completions"] else "count",
        entropy=case["entropy_coef"],
    )  # fmt: skip


class Numbers:
    """An engine that gives each prediction the numbers that its batch has for it."""

    module = SimpleNamespace(training=True)

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.leaves: list[tuple[torch.Tensor, PackedBatch]] = []

    def __call__(self, batch: PackedBatch, readout: Any) -> dict[str, torch.Tensor]:
        logprobs = batch.values[self.kind][batch.predict_at].double().requires_grad_()
        entropies = batch.values["entropies"][batch.predict_at].double().requires_grad_()
        self.leaves.append((logprobs, batch))
        return {"logprobs": logprobs, "entropy": entropies, "entropy_sum": entropies.sum()}


def examples_of(case: Case, config: GRPOConfig) -> list[Example]:
    prompts = [Example([2], [], columns={"prompt": "x"})] * len(LENGTHS)
    made = trees(prompts, judged_of(case), config, old=PEER["old"])
    more = ("now", "reference", "entropies")
    return [
        attrs.evolve(example, values={**example.values, **{name: PEER[name][at] for name in more}})
        for at, example in enumerate(Reported().marked(made))
    ]


def counts_of(examples: list[Example]) -> dict[str, float]:
    """The totals of a step with these examples."""
    batch = pack(examples, range(len(examples)))
    names = ("kept", "scored", "finished")
    return {name: float(batch.values[name].sum()) for name in names} | {
        "tokens": float(len(batch.predict)), "answers": float(batch.num_answers),
    }  # fmt: skip


def step_of(case: Case, *parts: slice) -> tuple[float, list[list[float]]]:
    """Our loss of one optimizer step whose micro-batches have these groups, and its gradient for
    each log-probability."""
    config = config_of(case)
    trainer = GRPOTrainer(config, None)
    trainer.run = SimpleNamespace(config=Config())  # type: ignore[assignment]
    trainer.policy = Numbers("now")  # type: ignore[assignment]
    trainer.reference = Numbers("reference") if config.method.kl_beta else None
    examples = examples_of(case, config)
    own = [group for part in parts for group in range(len(examples))[part]]
    counts = counts_of([examples[group] for group in own])
    value, gradient = 0.0, [[0.0] * size for size in LENGTHS.ravel()]
    for part in parts:
        groups = range(len(examples))[part]
        loss: Loss = trainer.loss(pack(examples, groups))
        whole = weighted_loss(loss, counts)
        whole.backward()
        value += whole.item()
        leaf, batch = trainer.policy.leaves[-1]
        assert leaf.grad is not None
        first = groups.start * LENGTHS.shape[1]
        starts: dict[int, int] = {}
        for place, answer, slope in zip(
            batch.predict_at.tolist(), batch.answer.tolist(), leaf.grad.tolist(), strict=True
        ):
            start = starts.setdefault(answer, place)
            gradient[first + answer][place - start] = slope
    return value, gradient


def whole(case: Case) -> tuple[float, list[list[float]]]:
    return step_of(case, slice(0, len(LENGTHS)))


def full(case: Case) -> Case:
    return PEER["defaults"] | case


def settings_of(case: Case) -> dict[str, Any]:
    found = ("value", "values", "gradient")
    return {name: value for name, value in case.items() if name not in found}


def named(case: Case) -> str:
    return " ".join(f"{name} {value}" for name, value in settings_of(case).items())


def same(case: Case, found: tuple[float, list[list[float]]], factor: float = 1.0) -> None:
    """Assert that our loss and its gradient are TRL's, multiplied by `factor`."""
    assert found[0] == pytest.approx(factor * case["value"], abs=1e-6)
    expected = [slope * factor for answer in case["gradient"] for slope in answer]
    assert [slope for answer in found[1] for slope in answer] == pytest.approx(expected, abs=1e-6)


def of(**settings: Any) -> Case:
    """The case of the file with these settings and no others."""
    (case,) = (case for case in PEER["losses"] if settings_of(case) == settings)
    return full(case)


DIFFERENT = [
    {"loss_type": "grpo", "mask_truncated_completions": True},
    {"loss_type": "dr_grpo", "mask_truncated_completions": True},
    {"loss_type": "dapo", "unscorable": True},
    {"loss_type": "grpo", "unscorable": True},
    {"loss_type": "dapo", "beta": 0.5, "use_bias_correction_kl": False},
    {"loss_type": "grpo", "beta": 0.5, "importance_sampling_level": "sequence"},
]
"""Cases in which we differ on purpose; each has a test below."""


def agrees(case: Case) -> bool:
    return settings_of(case) not in DIFFERENT


@pytest.mark.parametrize("case", PEER["advantages"], ids=named)
def test_advantages(case: Case) -> None:
    found = gains_of(judged_of(full(case)), config_of(full(case)))
    assert found.ravel().tolist() == pytest.approx(case["values"], abs=1e-6)


@pytest.mark.parametrize("case", filter(agrees, PEER["losses"]), ids=named)
def test_losses_and_their_gradients(case: Case) -> None:
    same(case, whole(full(case)))


@pytest.mark.parametrize(("kind", "per"), [("grpo", "answers"), ("dr_grpo", "constant")])
def test_cut_answers_that_are_left_out_are_in_no_count(kind: str, per: str) -> None:
    """TRL leaves their tokens out and counts the answers (trl#6369 was the same for dapo)."""
    case = of(loss_type=kind, mask_truncated_completions=True)
    same(case, whole(case), LENGTHS.size / (LENGTHS.size - NUM_CUT))


@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_an_answer_without_a_score_is_in_no_count(kind: str) -> None:
    """TRL gives it the advantage 0, and its tokens still count in the mean."""
    case = of(loss_type=kind, unscorable=True)
    tokens = LENGTHS.sum() / (LENGTHS.sum() - LENGTHS.ravel()[PEER["unscorable"]])
    same(case, whole(case), tokens if kind == "dapo" else LENGTHS.size / (LENGTHS.size - 1))


def test_kl_in_the_loss_always_has_the_ratio() -> None:
    """Without it, which TRL still allows, k3 has the gradient of another divergence
    (plugins/grpo/tests/test_losses.py)."""
    wrong = of(loss_type="dapo", beta=0.5, use_bias_correction_kl=False)
    value, gradient = whole(wrong)
    assert abs(value - wrong["value"]) > 1e-4
    same(of(loss_type="dapo", beta=0.5), (value, gradient))


def test_kl_has_the_ratio_of_each_token_also_under_a_ratio_of_sequences() -> None:
    """TRL multiplies the divergence of a token by the ratio of its answer, a geometric mean, under
    which its expectation is no divergence."""
    case = of(loss_type="grpo", beta=0.5, importance_sampling_level="sequence")
    value, _ = whole(case)
    free = whole(case | {"beta": 0.0})[0]
    ratios = np.exp([a - b for a, b in zip(*map(flat, ("now", "old")), strict=True)])
    difference = np.array(flat("now")) - np.array(flat("reference"))
    each = ratios * (np.exp(-difference) - 1 + difference)
    by_answer = np.split(each, np.cumsum(LENGTHS.ravel())[:-1])
    ours = 0.5 * np.mean([answer.mean() for answer in by_answer])
    assert value - free == pytest.approx(ours, abs=1e-6)
    assert abs(case["value"] - value) > 1e-4


def flat(name: str) -> list[float]:
    return [value for group in PEER[name] for answer in group for value in answer]


def test_each_step_is_divided_by_its_own_tokens() -> None:
    """TRL divides every step of a generation by the mean number of tokens of its steps, so a step
    of short answers has a smaller loss than its mean (grpo_trainer.py:3168 of 1.16)."""
    case = full({"loss_type": "dapo"})
    parts, tokens = (slice(0, 1), slice(1, 3)), (LENGTHS[0].sum(), LENGTHS[1:].sum())
    for part, size, theirs in zip(parts, tokens, PEER["two_steps"]["values"], strict=True):
        value, _ = step_of(case, part)
        assert value == pytest.approx(theirs * (sum(tokens) / 2) / size, abs=1e-6)
        assert abs(value - theirs) > 1e-3


def test_micro_batches_do_not_change_the_mean_over_tokens() -> None:
    """TRL's bnpo takes the mean of their means, and its entropy bonus does so with every loss."""
    case, parts = full({"loss_type": "dapo"}), (slice(0, 1), slice(1, 3))
    value, gradient = step_of(case, *parts)
    same(of(loss_type="bnpo"), (value, gradient))
    assert value == pytest.approx(PEER["micro_batches"]["dapo"], abs=1e-6)
    assert abs(value - PEER["micro_batches"]["bnpo"]) > 1e-3
    bonus = of(loss_type="dapo", entropy_coef=0.25)
    same(bonus, step_of(bonus, *parts))
