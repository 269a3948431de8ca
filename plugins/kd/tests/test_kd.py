"""The trainer: what is trained on, what its settings refuse, whose answers it takes, and what every
trainer has to prove."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlhf.errors import RLHFError
from rlhf.readouts import Head
from rlhf.trainer import Answer, Example, PackedBatch, Sample
from rlhf_devkit import Other, TrainerConformance, pack, weighted_loss
from rlhf_distill import Mixture
from rlhf_plugin_kd.answers import check_room, chosen, with_new_answers
from rlhf_plugin_kd.config import NEEDS, KDConfig
from rlhf_plugin_kd.losses import measure
from rlhf_plugin_kd.trainer import KDTrainer


class TestKD(TrainerConformance):
    trainer = "kd"
    words = ("--kd.teacher", "{other_model}")
    clip = "0.01"
    without_effect: ClassVar = {
        "teacher_revision": "a folder has no revisions; test_teachers.py has a hub's"
    }
    others: ClassVar = {
        "teacher": "demo:base",
        "loss": "reverse_kl",
        "temperature": 2.0,
        "beta": Other(value=0.2, under={"loss": "jsd"}),
        "skew": Other(value=0.4, under={"loss": "skewed_forward_kl"}),
        "sft": 0.5,
        "cache_top": 3,
        "on_policy": Other(value=0.5, under={"teacher_answers": 0.5, "max_new_tokens": 8}),
        "teacher_answers": Other(value=0.5, under={"on_policy": 0.5, "max_new_tokens": 8}),
        "max_new_tokens": Other(value=4, under={"on_policy": 1.0, "max_new_tokens": 8}),
        "sampling_temperature": Other(value=5.0, under={"on_policy": 1.0, "max_new_tokens": 8}),
    }

    marks_of_other_layouts = (pytest.mark.matrix,)

    @pytest.mark.matrix
    def test_a_run_with_another_setting_resumes_to_the_last_bit(self, bench: Any) -> None:
        super().test_a_run_with_another_setting_resumes_to_the_last_bit(bench)


class Fixed:
    """An engine whose logits are the same everywhere."""

    def __init__(self, *logits: float) -> None:
        self.logits = torch.tensor(logits)

    def __call__(self, batch: PackedBatch, readout: Any) -> Any:
        hidden = torch.ones(len(batch.tokens), 1, requires_grad=True)
        self.hidden = hidden
        return readout(hidden, Head(weight=self.logits[:, None]), batch)


def trainer(*, nll: float = 0.0) -> KDTrainer:
    """A student that finds three tokens alike and a teacher that is twice as sure of token 2."""
    made = KDTrainer(KDConfig(), tokenizer=None)
    made.policy = Fixed(0.0, 0.0, 0.0)  # type: ignore[assignment]
    made.teacher = Fixed(0.0, 0.0, math.log(2.0))  # type: ignore[assignment]
    made.mixture = Mixture(measure("forward_kl", beta=0.5, skew=0.1), nll=nll)
    return made


def row() -> Any:
    return SimpleNamespace(prompt=[1, 2, 1], answers=[Answer([0, 1, 2], [True, False, True])])


def test_the_first_answer_token_is_trained_on_and_the_last_prompt_token_is_not() -> None:
    made = trainer()
    made.policy = student = Fixed(0.5, 0.0, 0.0)  # type: ignore[assignment]
    batch = pack([made.example(row())], [0])
    made.loss(batch).terms[0].sum.backward()
    assert batch.predict_from.tolist() == [2, 4]
    assert batch.predict.tolist() == [0, 2]
    assert student.hidden.grad.squeeze(-1).nonzero().flatten().tolist() == [2, 4]


def test_loss_and_metrics_worked_by_hand() -> None:
    # p = (1/4, 1/4, 1/2), q = 1/3: KL = 1/2 ln(3/4) + 1/2 ln(3/2); two tokens are trained on.
    made, kl = trainer(nll=0.25), 0.5 * math.log(3 / 4) + 0.5 * math.log(3 / 2)
    loss = made.loss(pack([made.example(row())], [0]))
    value = weighted_loss(loss, {"tokens": 2}).item()
    assert value == pytest.approx(0.75 * kl + 0.25 * math.log(3), abs=1e-6)
    means = {name: (total.item() / 2, per) for name, (total, per) in loss.metrics.items()}
    assert means == {
        "kl": (pytest.approx(kl, abs=1e-6), "tokens"),
        "sft_loss": (pytest.approx(math.log(3)), "tokens"),
        "entropy": (pytest.approx(math.log(3)), "tokens"),
        "mean_token_accuracy": (0.5, "tokens"),
        "agreement": (0.0, "tokens"),
    }


def test_a_filler_has_no_loss() -> None:
    made = trainer()
    loss = made.loss(pack([made.example(row())], []))
    assert loss.terms[0].sum.item() == 0.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"on_policy": 0.7, "teacher_answers": 0.5},
            "on_policy 0.7 and teacher_answers 0.5 are shares of the same rows; "
            "together they must be at most 1",
        ),
        (
            {"sft": 0.1, "on_policy": 0.5},
            "sft 0.1 cannot be combined with on_policy 0.5: the student's own answers would count "
            "as correct",
        ),
        (
            {"sft": 1.0},
            "sft 1 learns nothing from the teacher; lower it, or add teacher_answers",
        ),
        (
            {"cache_top": 5, "on_policy": 0.5},
            "cache_top cannot be combined with on_policy 0.5: it covers only the rows' own answers",
        ),
        (
            {"cache_top": 5, "on_policy": 0.5, "teacher_answers": 0.2},
            "cache_top cannot be combined with on_policy 0.5 and teacher_answers 0.2: it covers "
            "only the rows' own answers",
        ),
        ({"beta": 0.1}, f"beta would have no effect here: {NEEDS}"),
        (
            {"skew": 0.2, "max_new_tokens": 9},
            f"skew and max_new_tokens would have no effect here: {NEEDS}",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as error:
        KDConfig(**settings)
    assert str(error.value) == problem


def test_a_budget_that_cannot_hold_new_answers_is_refused_before_anything_loads() -> None:
    def check(budget: int, **settings: int) -> None:
        train, held_out = (
            SimpleNamespace(prompt_lengths=np.array(sizes), name=lambda number: f"row {number}")
            for sizes in ([3, 7, 5], [2, 8])
        )
        run = SimpleNamespace(
            examples=[train, held_out],
            config=SimpleNamespace(
                batch=SimpleNamespace(budget=budget), data=SimpleNamespace(max_tokens=100)
            ),
        )
        check_room(run, KDConfig(on_policy=0.5, **settings))

    check(12, max_new_tokens=4)
    with pytest.raises(RLHFError) as error:
        check(11, max_new_tokens=4)
    assert str(error.value) == (
        "row 1: with a new answer the example may have 12 tokens but batch.tokens is 11: set "
        "batch.tokens to at least 12, or lower kd.max_new_tokens"
    )
    check(100, max_new_tokens=400)


def test_new_answers_need_prompts() -> None:
    rows = SimpleNamespace(prompt_lengths=np.zeros(3, np.int64))
    run: Any = SimpleNamespace(examples=[rows])
    with pytest.raises(RLHFError) as error:
        check_room(run, KDConfig(teacher_answers=0.5, max_new_tokens=4))
    assert str(error.value) == (
        "kd: no row of data.train has a prompt, so on_policy and teacher_answers would have no "
        "effect; give rows with prompts, or remove these settings"
    )
    check_room(run, KDConfig())


class Writer:
    """Stands where a run does: answers with the prompt and the seed's last digit."""

    def sample(self, engine: str, prompts: Any, *, seeds: Any, **options: Any) -> Any:
        expected = {"max_new_tokens": 5, "temperature": 0.5, "inputs": [{}] * len(prompts)}
        assert options == expected
        mark = {"student": 100, "teacher": 200}[engine]
        return [
            Sample([mark, *prompt, *prompt, seed], [])
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]


def rows(count: int) -> list[Example]:
    return [Example([number, number], [Answer([7, 7], [False, True])]) for number in range(count)]


def write(config: KDConfig, given: list[Example], first_seed: int) -> list[Example]:
    writer: Any = Writer()
    seeds = range(first_seed, first_seed + len(given))
    return with_new_answers(writer, config, given, seeds, student="student", teacher="teacher")  # type: ignore[arg-type]


def test_answers_are_replaced_at_the_given_rates() -> None:
    config = KDConfig(
        on_policy=0.5, teacher_answers=0.25, max_new_tokens=5, sampling_temperature=0.5
    )
    given = rows(400)
    made = write(config, given, 0)
    starts = [example.answers[0].tokens[0] for example in made]
    assert starts.count(100) == pytest.approx(200, abs=30)
    assert starts.count(200) == pytest.approx(100, abs=30)
    for before, after in zip(given, made, strict=True):
        assert after.prompt == before.prompt
        if after is not before:
            assert len(after.answers[0].tokens) == 6
            assert after.answers[0].trained is None
    assert write(config, given, 0) == made
    assert [e.answers for e in write(config, given, 400)] != [e.answers for e in made]


def test_a_row_without_a_prompt_keeps_its_answer() -> None:
    given = [Example([], [Answer([1, 2])]), *rows(1)]
    config = KDConfig(on_policy=1.0)
    assert chosen(given, [4, 5], config) == {"student": [1], "teacher": []}


@pytest.mark.matrix
def test_the_demo_brings_the_student_near_its_teacher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf", "run", "kd"]
    environment = os.environ | {"RLHF_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    kl = re.search(r"nats per token +([\d.]+) +([\d.]+)", done.stdout)
    agreement = re.search(r"same most likely token +([\d.]+)% +([\d.]+)%", done.stdout)
    assert kl is not None
    assert agreement is not None
    assert float(kl[2]) < 0.25 * float(kl[1])
    assert float(agreement[1]) < 10
    assert float(agreement[2]) > 45
