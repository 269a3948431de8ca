"""Which forwards a rollout takes, which models a run loads, and metrics that are not bounded."""

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from rlhf.errors import RLHFError
from rlhf.trainer import Example, Sample
from rlhf_plugin_grpo.config import KL, GRPOConfig
from rlhf_plugin_grpo.trainer import PATIENCE, GRPOTrainer
from rlhf_rollouts import on_policy
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.metrics import of_sampling
from rlhf_rollouts.ratios import corrections
from rlhf_rollouts.rewards import Scores
from rlhf_rollouts.settings import Correction, Tools

SUMMARY = ("min", "mean", "max")


class Forwards:
    """A run that counts forwards without gradient, and the references that are loaded."""

    def __init__(self, replay: str | None = None, lag: int = 0) -> None:
        rollouts = SimpleNamespace(replay=replay, lag=lag)
        self.config = SimpleNamespace(batch=None, data=None, rollouts=rollouts)
        self.notes: list[str] = []
        self.reads = self.references = 0
        self.logprob = -0.5
        """What every model gives to each token."""

    def read(self, examples: list[Example], compute: Any) -> list[list[Any]]:
        self.reads += 1
        return [
            [np.full(len(it.tokens), self.logprob) for it in example.answers]
            for example in examples
        ]

    def on_rank_zero(self, act: Any, *, share: bool) -> None:
        return None

    def load(self, role: str, *, dropout: bool, first_step: int) -> Any:
        return SimpleNamespace(module=SimpleNamespace())

    def reference(self, mode: str, **options: Any) -> str:
        self.references += 1
        return "reference"


def trainer_of(run: Forwards, **settings: Any) -> GRPOTrainer:
    trainer = GRPOTrainer(GRPOConfig(answers=2, **settings), None)
    trainer.run, trainer.reference = run, "reference"  # type: ignore[assignment]
    return trainer


def take_rollout(trainer: GRPOTrainer) -> list[Example]:
    """Train on another rollout, whose tokens were drawn with a log-probability of -0.5."""
    group = [Sample([3, 1], [-0.5, -0.5]), Sample([4], [-0.5])]
    rewards = np.array([1.0, 0.0])
    judged = Judged.of([group], Scores({"one": rewards}, rewards, {}, {}))
    trainer.rollouts += 1
    return trainer.trained([Example([2], [])], judged, trainer.rollouts - 1)


def test_a_few_prompts_whose_answers_are_alike_are_a_warning() -> None:
    run = Forwards()
    trainer = trainer_of(run)
    for step, reward in enumerate([1.0, *[0.0] * (PATIENCE + 3)]):
        rewards = np.full(4, reward) - np.array([0, 0.5, 0, 0]) * reward
        groups = [[Sample([4], [-0.5], finished=True)] * 2] * 2
        trainer.check(Judged.of(groups, Scores({"one": rewards}, rewards, {}, {})), step)
    assert [line for line in run.notes if line.startswith("warning")] == [
        f"warning    step {PATIENCE + 1}: the answers to each of the last {2 * PATIENCE} prompts "
        "had the same reward, now 0 on average and 0.875 at the start: the policy may have "
        "collapsed; lower optim.lr, or set grpo.kl.beta"
    ]


def reads_of_rollouts(number: int, **settings: Any) -> list[int]:
    """How many forwards each of the first rollouts takes, with the run resumed after each."""
    run, counts, state = Forwards(), [], None
    for _ in range(number):
        trainer, before = trainer_of(run, **settings), run.reads
        if state is not None:
            trainer.load_state(state)
        take_rollout(trainer)
        state = trainer.state()
        counts.append(run.reads - before)
    assert sum(note.startswith("agreement ") for note in run.notes) == 1
    return counts


def test_rollouts_1_2_4_and_8_take_a_forward_if_they_serve_one_step() -> None:
    assert reads_of_rollouts(9, preset="grpo") == [1, 1, 0, 1, 0, 0, 0, 1, 0]
    assert reads_of_rollouts(3, preset="grpo", passes=2) == [1, 1, 1]
    # The reward needs the log-ratio of policy and reference.
    assert reads_of_rollouts(3, preset="rloo") == [2, 2, 2]


def test_an_engine_that_leaves_out_the_adapter_is_found_when_the_adapter_has_learned() -> None:
    run = Forwards()
    trainer = trainer_of(run)
    take_rollout(trainer)
    run.logprob = -0.75  # The first step has changed the policy, but not what is drawn.
    with pytest.raises(RLHFError) as caught:
        take_rollout(trainer)
    assert str(caught.value).startswith(
        "the log-probabilities of the 3 tokens of the rollout of step 2 differ by 0.25 on average "
    )


def test_a_replay_with_other_settings_is_compared_in_its_first_rollout_only() -> None:
    run = Forwards(replay="runs/other")
    trainer = trainer_of(run)
    take_rollout(trainer)
    run.logprob = -0.75
    take_rollout(trainer)
    assert run.reads == 1  # Nothing would be done with those of the second one.
    with pytest.raises(RLHFError, match="tokens of the rollout of step 1 differ by"):
        take_rollout(trainer_of(run))


def test_answers_of_older_weights_are_compared_in_the_first_rollout_only() -> None:
    run = Forwards(lag=1)
    trainer = trainer_of(run)
    take_rollout(trainer)
    run.logprob = -0.75
    take_rollout(trainer)
    assert run.reads == 1
    with pytest.raises(RLHFError, match="tokens of the rollout of step 1 differ by"):
        take_rollout(trainer_of(run))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tools": Tools(functions=("json:dumps",))}, "grpo.tools cannot be combined with"),
        ({"correction": Correction(kind="none")}, "grpo.correction.kind none cannot be combined"),
    ],
    ids=["tools", "correction"],
)
def test_a_trainer_without_a_check_of_its_own_refuses_a_lag(settings: Any, problem: str) -> None:
    run: Any = Forwards(lag=1)
    run.config.own = GRPOConfig(**settings)
    trainer = GRPOTrainer(attrs.evolve(run.config.own, tools=Tools()), None)
    with pytest.raises(RLHFError, match=problem):
        trainer.setup(run)


def test_kl_in_the_reward_is_reported_for_each_answer() -> None:
    run = Forwards()
    trainer = trainer_of(run, preset="rloo")
    logprobs = iter([-0.5, -0.75])
    read = run.read

    def of_both(examples: list[Example], compute: Any) -> list[list[Any]]:
        run.logprob = next(logprobs)
        return read(examples, compute)

    run.read = of_both  # type: ignore[method-assign]
    (tree,) = take_rollout(trainer)
    assert tree.values["kl"].tolist() == [0.5, 0.25]
    # leave_one_out: the rewards 1 and 0, minus 0.05 times the log-ratio, minus that of the other.
    assert tree.values["advantage"].tolist() == pytest.approx([0.9875, -0.9875])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_reference_is_loaded_only_for_a_kl(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_policy, "check_room", lambda *given: None)
    monkeypatch.setattr(on_policy, "Judges", lambda *given, **options: None)
    run = Forwards()
    trainer = GRPOTrainer(GRPOConfig(preset="dr_grpo", kl=KL(beta=beta)), None)
    trainer.setup(run)  # type: ignore[arg-type]
    assert (run.references, trainer.reference is None) == ((1, False) if beta else (0, True))


def test_metrics_of_sampling_are_those_before_the_correction() -> None:
    old, drawn = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -4.0, 0.0])
    batch: Any = SimpleNamespace(answer=torch.tensor([0, 0, 1]), num_answers=2)
    assert corrections(old, drawn, Correction(), batch.answer, 2).max() == 2
    ratios = {"token": [1, np.exp(3), np.exp(-1)], "sequence": [np.exp(3), np.exp(3), np.exp(-1)]}
    for level, expected in ratios.items():
        found: Any = of_sampling(old, drawn, batch, level)
        named = [found[f"sampling/importance_sampling_ratio/{name}"] for name in SUMMARY]
        assert [value.item() for value, _ in named] == pytest.approx(
            [min(expected), sum(expected), max(expected)]
        )
        assert found["sampling/sampling_logp_difference/max"][0].item() == 3
