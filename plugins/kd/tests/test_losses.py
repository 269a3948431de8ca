"""The divergences against numbers worked by hand, their limits, and autograd's derivative."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.readouts import Head
from rlhf.trainer import Answer, Example
from rlhf_devkit import pack
from rlhf_distill import Mixture, WholeTeacher, divergence
from rlhf_plugin_kd.losses import measure

P = torch.tensor([[0.75, 0.25]]).log()
Q = torch.tensor([[0.5, 0.5]]).log()
NAMES = ("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl")


# m of jsd and of the skewed KLs at 1/2: (5/8, 3/8).
# forward: 3/4 ln(3/2) - 1/4 ln 2; reverse: 1/2 ln(2/3) + 1/2 ln 2
# jsd: 1/2 (3/4 ln(6/5) + 1/4 ln(2/3)) + 1/2 (1/2 ln(4/5) + 1/2 ln(4/3))
HAND = {
    "forward_kl": 0.75 * math.log(3 / 2) - 0.25 * math.log(2),
    "reverse_kl": 0.5 * math.log(2 / 3) + 0.5 * math.log(2),
    "jsd": 0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3))
    + 0.5 * (0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3)),
    "skewed_forward_kl": 0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3),
    "skewed_reverse_kl": 0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3),
}
DIGITS = {
    "forward_kl": 0.130812,
    "reverse_kl": 0.143841,
    "jsd": 0.033822,
    "skewed_forward_kl": 0.035375,
    "skewed_reverse_kl": 0.032269,
}
# The derivative by the first token's log q; of the second likewise.
SLOPES = {
    "forward_kl": (-0.75, -0.25),
    "reverse_kl": (0.5 * (math.log(2 / 3) + 1), 0.5 * (math.log(2) + 1)),
    "jsd": (0.25 * math.log(4 / 5), 0.25 * math.log(4 / 3)),
    "skewed_forward_kl": (-0.5 * 0.75 * 0.8, -0.5 * 0.25 * 4 / 3),
    "skewed_reverse_kl": (
        0.5 * (math.log(4 / 5) + 1 - 0.5 * 0.8),
        0.5 * (math.log(4 / 3) + 1 - 0.5 * 4 / 3),
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_numbers_worked_by_hand(name: str) -> None:
    value, slope = measure(name, beta=0.5, skew=0.5)(Q, P)
    assert value.item() == pytest.approx(HAND[name], abs=1e-6)
    assert value.item() == pytest.approx(DIGITS[name], abs=1e-6)
    assert slope[0].tolist() == pytest.approx(SLOPES[name], abs=1e-6)


def test_an_uneven_mixture_worked_by_hand() -> None:
    # beta 1/4: m = (9/16, 7/16); skew 1/4, forward: m likewise; reverse: m = (11/16, 5/16).
    first, second = 0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7), 0.5 * math.log(64 / 63)
    assert measure("jsd", beta=0.25, skew=0.5)(Q, P)[0].item() == pytest.approx(
        0.25 * first + 0.75 * second, abs=1e-6
    )
    assert measure("skewed_forward_kl", beta=0.5, skew=0.25)(Q, P)[0].item() == pytest.approx(
        first, abs=1e-6
    )
    third = 0.5 * math.log(64 / 55)
    assert measure("skewed_reverse_kl", beta=0.5, skew=0.25)(Q, P)[0].item() == pytest.approx(
        third, abs=1e-6
    )


def plain(name: str, q: Tensor, p: Tensor, beta: float, skew: float) -> Tensor:
    """The definitions in probabilities."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(-1)

    mixed = beta * p + (1 - beta) * q
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mixed) + (1 - beta) * kl(q, mixed),
        "skewed_forward_kl": lambda: kl(p, skew * p + (1 - skew) * q),
        "skewed_reverse_kl": lambda: kl(q, (1 - skew) * p + skew * q),
    }[name]()


def logprobs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 9, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_value_and_derivative_are_those_of_the_definition(name: str) -> None:
    free, teacher = logprobs(0).requires_grad_(), logprobs(1)
    wanted = plain(name, free.exp(), teacher.exp(), 0.3, 0.2)
    wanted.sum().backward()
    value, slope = measure(name, beta=0.3, skew=0.2)(free.detach(), teacher)
    torch.testing.assert_close(value, wanted.detach())
    torch.testing.assert_close(slope, free.grad)


@pytest.mark.parametrize("name", NAMES)
def test_a_student_that_is_its_teacher_is_at_zero(name: str) -> None:
    value, slope = measure(name, beta=0.3, skew=0.2)(logprobs(0), logprobs(0))
    torch.testing.assert_close(value, torch.zeros_like(value))
    through_softmax = slope - logprobs(0).exp() * slope.sum(-1, keepdim=True)
    torch.testing.assert_close(through_softmax, torch.zeros_like(slope), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_probability_of_zero_is_not_a_special_case(name: str) -> None:
    certain = torch.tensor([[0.0, -200.0, -200.0]])
    other = torch.tensor([[-200.0, 0.0, -200.0]])
    value, slope = measure(name, beta=0.5, skew=0.1)(certain, other)
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize(
    ("name", "share", "scale", "of"),
    [
        ("jsd", 1e-8, 1e-8, "forward_kl"),
        ("jsd", 1 - 1e-8, 1e-8, "reverse_kl"),
        ("skewed_forward_kl", 1e-9, 1, "forward_kl"),
        ("skewed_reverse_kl", 1e-9, 1, "reverse_kl"),
    ],
)
def test_jsd_and_skewed_kls_approach_the_kls_in_their_limits(
    name: str, share: float, scale: float, of: str
) -> None:
    found = measure(name, beta=share, skew=share)(logprobs(0), logprobs(1))[0] / scale
    expected = measure(of, beta=0.5, skew=0.5)(logprobs(0), logprobs(1))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_jsd_at_one_half_is_symmetric_and_bounded_by_the_logarithm_of_two() -> None:
    one, other = logprobs(0), logprobs(1)
    even = measure("jsd", beta=0.5, skew=0.1)
    torch.testing.assert_close(even(one, other)[0], even(other, one)[0])
    apart = torch.tensor([[0.0, -200.0]])
    assert even(apart, apart.flip(-1))[0].item() == pytest.approx(math.log(2))


def test_the_temperature_reaches_the_loss_with_its_square() -> None:
    """Logits of q are (0, 0) at any temperature; of p (ln 9, 0), so that at temperature 2 p is
    (3/4, 1/4): four times the forward KL worked out above."""
    batch = pack([Example([0], [Answer([1])])], [0])
    hidden = torch.zeros(2, 1, requires_grad=True)
    head = Head(weight=torch.tensor([[1.0], [0.0]]))
    tutor = WholeTeacher(torch.ones(1, 1), Head(weight=torch.tensor([[math.log(9.0)], [0.0]])))
    mixture = Mixture(measure("forward_kl", beta=0.5, skew=0.1), temperature=2.0)
    read = divergence(hidden, head, batch, teacher=tutor, mixture=mixture)
    read["loss"].backward()
    assert read["loss"].item() == pytest.approx(4 * DIGITS["forward_kl"], abs=1e-5)
    # By the first logit: temperature * (q - p) = 2 * (1/2 - 3/4).
    assert hidden.grad is not None
    assert hidden.grad[0, 0].item() == pytest.approx(-0.5, abs=1e-6)
