"""Noise from counters: draws follow the softmax and depend only on their seed and place."""

import torch
from torch import Tensor

from rlhf_rollouts.noise import draw, gumbel, keys, seed_tensor


def chi_square(drawn: Tensor, shares: Tensor) -> tuple[float, int]:
    """Return chi-square of tokens [n] against their shares [V], without rare ones, and the degrees
    of freedom."""
    counts = torch.bincount(drawn, minlength=len(shares)).double()
    expected = shares.double() * len(drawn)
    known = expected > 5
    distance = ((counts - expected)[known] ** 2 / expected[known]).sum()
    return float(distance), int(known.sum()) - 1


def test_draws_follow_the_softmax_at_the_temperature_over_seeds_and_over_places() -> None:
    count, temperature = 20_000, 2.0
    logits = torch.tensor([0.0, 1.0, 3.0, -2.0])
    rows, numbers = logits.repeat(count, 1), torch.arange(count)
    for seeds, steps in ((numbers, torch.zeros_like(numbers)), (numbers * 0 + 7, numbers)):
        drawn, _ = draw(rows, seeds, steps, temperature=temperature)
        distance, freedom = chi_square(drawn, (logits / temperature).softmax(-1))
        assert freedom == 3
        assert distance < 16.3  # 99.9 %


def test_draws_follow_the_softmax_in_all_blocks_of_a_vocabulary() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 2
    seeds = torch.arange(20_000)
    drawn, logprobs = draw(
        logits.repeat(len(seeds), 1), seeds, torch.full_like(seeds, 3), temperature=1.0
    )
    distance, freedom = chi_square(drawn, logits.softmax(-1))
    assert abs(distance - freedom) < 3.3 * (2 * freedom) ** 0.5
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[drawn])


def test_a_draw_depends_only_on_its_seed_and_place() -> None:
    logits = torch.zeros(4, 200)
    seeds, steps = (
        seed_tensor([7, 2**64 - 1, -1, 7], torch.device("cpu")),
        torch.tensor([0, 5, 5, 1]),
    )
    together, _ = draw(logits, seeds, steps, temperature=1.0)
    for row in range(4):
        single, _ = draw(logits[:1], seeds[row, None], steps[row, None], temperature=1.0)
        assert single == together[row]
    assert together[1] == together[2]
    assert together[0] != together[3]


def test_noise_of_neighbouring_seeds_places_and_tokens_is_not_correlated() -> None:
    seeds, tokens = torch.arange(300), torch.arange(300)
    noise = gumbel(keys(seeds, seeds * 0), tokens)
    later = gumbel(keys(seeds, seeds * 0 + 1), tokens)
    pairs = ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, later))
    for one, other in pairs:
        both = torch.stack((one.flatten(), other.flatten()))
        assert abs(torch.corrcoef(both)[0, 1]) < 4 / one.numel() ** 0.5
    assert noise.isfinite().all()
    torch.testing.assert_close(noise.mean(), torch.tensor(0.5772), atol=0.02, rtol=0)
    torch.testing.assert_close(noise.var(), torch.tensor(torch.pi**2 / 6), atol=0.05, rtol=0)


def test_only_the_first_tokens_are_drawn_and_at_temperature_0_the_most_likely_one() -> None:
    logits = torch.randn(50, 260, generator=torch.Generator().manual_seed(0))
    logits[:, 150:] += 100
    numbers = torch.arange(50)
    drawn, _ = draw(logits, numbers, numbers, temperature=1.0, tokens=150)
    assert drawn.max() < 150
    greedy, logprobs = draw(logits, numbers, numbers, temperature=0.0, tokens=150)
    known = logits[:, :150].log_softmax(-1)
    assert torch.equal(greedy, known.argmax(-1))
    torch.testing.assert_close(logprobs, known.max(-1).values)
