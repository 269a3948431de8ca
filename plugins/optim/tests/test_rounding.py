"""AdamW over bf16 states: what is rounded, and that nothing is lost by it."""

import pytest
import torch
from torch.optim import AdamW

from rlhf_optim.rounding import RoundedAdamW, coefficients, rounded_

ULP = 2.0**-7
"""Distance of 1 to the next bf16 above it."""


def test_rounding_takes_one_of_the_two_neighbours_and_is_right_on_average():
    torch.manual_seed(0)
    for value, below, above in ((1 + ULP / 4, 1.0, 1 + ULP), (-1 - ULP / 4, -1 - ULP, -1.0)):
        found = rounded_(torch.full((40_000,), value))
        assert set(found.tolist()) == {below, above}
        # 40,000 draws of a step of one ulp: the mean is known to 0.0022 of it.
        assert float(found.mean()) == pytest.approx(value, abs=0.01 * ULP)


def test_a_bf16_value_is_rounded_to_itself():
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
        monkeypatch.setattr("rlhf_optim.rounding.CHUNK", chunk)
        weight = torch.nn.Parameter(torch.ones(10, 100, dtype=torch.bfloat16))
        rounded = optimizer(weight)
        # From zero moments the first step is the rate itself, and eight ulps need no luck.
        rounded.param_groups[0]["lr"] = 8 * ULP
        weight.grad = torch.ones_like(weight)
        rounded.step()
        return weight.detach()

    assert torch.equal(moved(64), moved(1 << 24))


def moved(*, seed=0, steps=1):
    weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    rounded = RoundedAdamW([{"params": [weight]}], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, seed=seed)
    for _ in range(steps):
        weight.grad = torch.full_like(weight, 0.3)
        rounded.step()
    return weight.detach()


def test_ranks_that_hold_the_same_weights_round_them_alike():
    torch.manual_seed(1)
    one = moved()
    torch.manual_seed(2)
    assert torch.equal(one, moved())
    assert not torch.equal(one, moved(seed=1))


def test_every_step_has_new_draws():
    first, second = moved(), moved(steps=2)
    stayed = (first == 1.0) & (second < 1.0)
    assert 0 < int(stayed.sum()) < 1000


def test_a_factor_scales_the_gradient_and_nan_changes_no_weight():
    def run(size, factor):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        rounded = optimizer(weight)
        weight.grad = torch.full_like(weight, size)
        rounded.factor = torch.tensor(factor)
        rounded.step()
        return weight.detach(), rounded.state[weight]["exp_avg_sq"]

    for one, other in zip(run(0.5, 0.25), run(0.125, 1.0), strict=True):
        assert torch.equal(one, other)
    weight, square = run(0.5, float("nan"))
    assert torch.equal(weight, torch.ones_like(weight))
    assert not square.any()


@pytest.fixture
def kernel(monkeypatch):
    pytest.importorskip("triton")
    from rlhf_optim import rounding_triton

    monkeypatch.setattr(rounding_triton, "BLOCK", 256)
    return rounding_triton


def test_the_kernel_rounds_the_same_update_stochastically(kernel):
    torch.manual_seed(0)
    sizes = (300, 77, 256)
    parts = [[torch.randn(size).bfloat16() for _ in range(4)] for size in sizes]
    parts = [(w, g, 0.1 * m, v.abs()) for w, g, m, v in parts]
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    factor, values = torch.tensor(0.5), coefficients(group, 3)
    seeds = range(100)
    sums = [[torch.zeros_like(t, dtype=torch.float64) for t in (w, m, v)] for w, _, m, v in parts]
    for seed in seeds:
        pieces = [(w.clone(), g, m.clone(), v.clone()) for w, g, m, v in parts]
        kernel.update(pieces, factor=factor, seed=seed * 7919, coefficients=values)
        for total, (w, _, m, v) in zip(sums, pieces, strict=True):
            for one, found in zip(total, (w, m, v), strict=True):
                one += found.double() / len(seeds)
    for total, (weight, gradient, mean, square) in zip(sums, parts, strict=True):
        slope = 0.5 * gradient.double()
        first = mean.double().lerp(slope, 0.1)
        second = square.double().lerp(slope.square(), 0.001)
        divisor = (second / (1 - 0.999**3)).sqrt() + 1e-8
        moved = weight.double() * (1 - 1e-4) - 1e-3 / (1 - 0.9**3) * first / divisor
        for found, expected in zip(total, (moved, first, second), strict=True):
            # The mean of many draws is nearer than the nearest value of bf16.
            nearest = expected.float().bfloat16().double()
            error = (found - expected).abs().mean()
            assert float(error) < 0.7 * float((nearest - expected).abs().mean())


@pytest.mark.parametrize("shape", [(300,), (3, 100), (0,), (128,)])
def test_the_kernel_updates_tensors_in_pieces(shape, kernel, monkeypatch):
    monkeypatch.setattr(kernel, "PIECE", 128)
    parts = [[torch.full(shape, one).bfloat16() for one in (1, 0, 2, 4)] for _ in range(2)]
    values = (0.5, 0.5, 1.0, 0.5, 0.0, 1.0)  # Of the weight half is kept, the moments are halved.
    kernel.update(parts, factor=torch.tensor(1.0), seed=1, coefficients=values)
    for part in parts:
        for tensor, value in zip(part, (0.5, 0, 1, 2), strict=True):
            assert torch.equal(tensor, torch.full_like(tensor, value))


def test_the_kernel_changes_nothing_by_a_factor_that_is_not_finite(kernel):
    piece = tuple(torch.randn(300).bfloat16() for _ in range(4))
    kept = [tensor.clone() for tensor in piece]
    values = (0.1, 0.001, 1e-8, 1.0, 1e-3, 1.0)
    kernel.update([piece], factor=torch.tensor(float("nan")), seed=1, coefficients=values)
    assert all(torch.equal(one, other) for one, other in zip(piece, kept, strict=True))
