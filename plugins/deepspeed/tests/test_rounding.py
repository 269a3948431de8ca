"""AdamW over bf16 states: what is rounded, and that nothing is lost by it."""

import pytest
import torch
from torch.optim import AdamW

from rlhf_plugin_deepspeed.rounding import RoundedAdamW, rounded_

ULP = 2.0**-7
"""Distance of 1 to the next bf16 above it."""


def test_rounding_takes_one_of_the_two_neighbours_and_is_right_on_average():
    torch.manual_seed(0)
    for value, below, above in ((1 + ULP / 4, 1.0, 1 + ULP), (-1 - ULP / 4, -1 - ULP, -1.0)):
        found = rounded_(torch.full((40_000,), value))
        assert set(found.tolist()) == {below, above}
        # 40,000 draws of a step of one ulp: the mean is known to 0.0022 of it.
        assert float(found.mean()) == pytest.approx(value, abs=0.01 * ULP)


def test_a_value_of_bf16_stays_what_it_is():
    values = torch.randn(1000).bfloat16().float()
    values[:4] = torch.tensor([0.0, 1.0, -3.5, 2.0**-126])
    assert torch.equal(rounded_(values.clone()), values)


def optimizer(weight, **settings):
    return RoundedAdamW([{"params": [weight], **settings}], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)


def test_the_mean_of_many_weights_follows_adamw_in_fp32():
    torch.manual_seed(0)
    exact = torch.nn.Parameter(torch.full((20_000,), 1.0))
    weight = torch.nn.Parameter(exact.detach().bfloat16())
    reference = AdamW([exact], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    rounded = optimizer(weight, weight_decay=0.1)
    for step in range(20):
        exact.grad = torch.full_like(exact, 0.5 + 0.1 * step)
        weight.grad = exact.grad.bfloat16()
        reference.step()
        rounded.step()
    # A step is an eighth of an ulp: rounded to the nearest no weight would ever move.
    expected = float(exact.detach().mean())
    assert expected == pytest.approx(0.977, abs=1e-3)
    assert float(weight.detach().float().mean()) == pytest.approx(expected, abs=5e-4)


def test_the_second_moment_falls_when_gradients_do():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    rounded = optimizer(weight)
    for size in [1.0] * 5 + [0.0] * 200:
        weight.grad = torch.full_like(weight, size)
        rounded.step()
    expected = (1 - 0.999**5) * 0.999**200
    found = float(rounded.state[weight]["exp_avg_sq"].float().mean())
    assert found == pytest.approx(expected, rel=0.01)


def test_parts_of_a_long_weight_are_updated_as_one(monkeypatch):
    def moved(chunk):
        monkeypatch.setattr("rlhf_plugin_deepspeed.rounding.CHUNK", chunk)
        weight = torch.nn.Parameter(torch.ones(10, 100, dtype=torch.bfloat16))
        rounded = optimizer(weight)
        # From zero moments the first step is the rate itself, and eight ulps need no luck.
        rounded.param_groups[0]["lr"] = 8 * ULP
        weight.grad = torch.ones_like(weight)
        rounded.step()
        return weight.detach()

    assert torch.equal(moved(64), moved(1 << 24))


def test_equal_random_states_round_alike():
    def run():
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        rounded = optimizer(weight)
        weight.grad = torch.full_like(weight, 0.3)
        rounded.step()
        return weight.detach()

    assert torch.equal(run(), run())
