"""Optimizers with one state per parameter: values by hand and beside torch's; matrices made
orthogonal."""

import pytest
import torch

from rlhf_optim import RULES, FirstMomentOptimizer, orthogonal


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # Signs of 0.1 x 2, 0.1 x -1 and then of 0.9 x 0.02 + 0.1 x -3, 0.9 x -0.01 + 0.1 x -1.
        ("lion", (0.9 * (0.9 * 1.0 - 0.1) + 0.1, 0.9 * (0.9 * -2.0 + 0.1) + 0.1)),
        # 2, -1 and then 0.9 x 2 - 3, 0.9 x -1 - 1.
        ("sgd", (0.9 * (0.9 * 1.0 - 0.2) + 0.12, 0.9 * (0.9 * -2.0 + 0.1) + 0.19)),
    ],
)
def test_two_steps_are_those_by_hand(name, weights):
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    groups = [{"params": [parameter], "weight_decay": 1.0}]
    optimizer = FirstMomentOptimizer(groups, rule=RULES[name], lr=0.1, betas=(0.9, 0.99))
    for gradient in ([2.0, -1.0], [-3.0, -1.0]):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert parameter.tolist() == pytest.approx(weights)


def test_sgd_is_that_of_torch():
    ours, theirs = (torch.nn.Parameter(torch.arange(5.0)) for _ in range(2))
    rule, betas = RULES["sgd"], (0.9, 0.999)
    pairs = (
        (ours, FirstMomentOptimizer([{"params": [ours]}], rule=rule, lr=0.1, betas=betas)),
        (theirs, torch.optim.SGD([theirs], lr=0.1, momentum=0.9)),
    )
    for step in range(3):
        for parameter, optimizer in pairs:
            parameter.grad = torch.arange(5.0).cos() + step
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (30, 5), (3, 6, 4)])
def test_singular_values_become_about_1(shape):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(value))
    assert 0.3 < values.min() < values.max() < 1.3
    assert orthogonal(torch.zeros(shape)).abs().max() == 0.0
