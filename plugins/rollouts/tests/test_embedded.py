"""The engine `embedded` draws from the model's own distribution."""

import torch

from rlhf_rollouts.embedded import Noise


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    count, temperature = 4000, 2.0
    logits = torch.tensor([0.0, 1.0, 3.0])
    noise = Noise(range(count), temperature, torch.device("cpu"))
    drawn = noise(torch.empty(0), logits.repeat(count, 1)).argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / count
    torch.testing.assert_close(shares, (logits / temperature).softmax(-1), atol=0.03, rtol=0)


def test_a_sample_depends_only_on_its_seed() -> None:
    scores = torch.zeros(3, 50)
    together = Noise([7, 8, 9], 1.0, torch.device("cpu"))
    single = Noise([9], 1.0, torch.device("cpu"))
    for _ in range(3):
        assert torch.equal(together(scores, scores)[2:], single(scores[:1], scores[:1]))
