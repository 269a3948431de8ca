"""The learning rate of every step, the last one too."""

import math

import pytest
import torch

from rlhf.config.sections import Config, OptimConfig
from rlhf.train.default_hooks import DefaultHooks, rate


def test_cosine_without_warmup_is_f_of_k_over_n() -> None:
    optim = OptimConfig(schedule="cosine", warmup=0)
    rates = [rate(step, steps=4, optim=optim) for step in range(4)]
    assert rates == pytest.approx([(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])


def test_linear_reaches_one_step_above_its_floor_at_the_last_step() -> None:
    optim = OptimConfig(schedule="linear", warmup=0, min_lr=0.2)
    assert rate(9, steps=10, optim=optim) == pytest.approx(0.2 + 0.8 * 0.1)


def test_no_schedule_rises_again_past_its_end() -> None:
    for schedule in ("linear", "cosine"):
        optim = OptimConfig(schedule=schedule, min_lr=0.1)
        assert rate(25, steps=10, optim=optim) == pytest.approx(0.1)


def test_warmup_is_a_share_below_one_and_a_number_of_steps_above() -> None:
    by_share = [rate(k, steps=40, optim=OptimConfig(warmup=0.1)) for k in range(40)]
    by_steps = [rate(k, steps=40, optim=OptimConfig(warmup=4)) for k in range(40)]
    assert by_share == by_steps
    assert by_steps[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_first_step_moves() -> None:
    assert rate(0, steps=100, optim=OptimConfig(warmup=0.1)) > 0


def test_the_default_hook_sets_the_rate_of_the_step_that_comes_next() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    config = Config(optim=OptimConfig(lr=2.0, schedule="linear", warmup=0))
    schedule = DefaultHooks().build_schedule(optimizer, config, 4)
    seen = []
    for _ in range(4):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([2.0, 1.5, 1.0, 0.5])
