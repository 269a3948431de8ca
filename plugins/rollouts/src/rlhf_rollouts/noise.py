"""Noise from counters: a draw depends only on the seed of its answer and its place in the answer,
not on the rows that are drawn with it.

Gumbel's construction: the largest of logits with Gumbel noise is a draw from their softmax. Here it
is used twice, first among blocks of tokens, each with the logarithm of its tokens' total, and then
among the tokens of the block drawn. The result has the same distribution, and most tokens of a
large vocabulary need no noise.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 128
"""Tokens in a block: the fewest numbers for vocabularies from 16k to 256k, within a factor 2."""
WORD = 0xFFFFFFFF
GOLDEN = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed number: the increment of SplitMix64."""


def seed_tensor(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return integers of any size, modulo 2^64, as int64 [n]."""
    words = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    return torch.from_numpy(words.view(np.int64)).to(device)


def draw(
    logits: Tensor, seeds: Tensor, steps: Tensor, *, temperature: float, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw the token at place `steps` [rows] of each answer from its logits [rows, V], of which
    only the first `tokens` count. At temperature 0 it is the most likely one.

    Returns tokens, int64 [rows], and their log-probabilities at the temperature, or at 1 if it is
    0, float32 [rows].
    """
    logits = logits[:, :tokens]
    rows, size = logits.shape
    blocks = -(-size // BLOCK)
    # The only copy of the logits in float32, padded to whole blocks.
    scores = logits.new_full((rows, blocks * BLOCK), -torch.inf, dtype=torch.float32)
    scores[:, :size] = logits
    scores = scores.div_(temperature or 1.0).view(rows, blocks, BLOCK)
    highest, places = scores.max(-1)
    # A block without finite logits has the total 0.
    base = highest.clamp(min=torch.finfo(torch.float32).min)
    totals = scores.sub_(base[..., None]).exp_().sum(-1).log_().add_(base)
    if temperature:
        key = keys(seeds, steps)
        block = (totals + gumbel(key, -1 - torch.arange(blocks, device=logits.device))).argmax(-1)
        of_block = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
        inside = logits.gather(1, of_block.clamp(max=size - 1)).float() / temperature
        inside = inside.masked_fill(of_block >= size, -torch.inf)
        place = (inside + gumbel(key, of_block)).argmax(-1, keepdim=True)
        drawn = block * BLOCK + place.squeeze(1)
        score = inside.gather(1, place).squeeze(1)
    else:
        score, block = highest.max(-1)
        drawn = block * BLOCK + places.gather(1, block[:, None]).squeeze(1)
    return drawn, score - totals.logsumexp(-1)


def keys(seeds: Tensor, steps: Tensor) -> Tensor:
    """Return 64 random bits for each pair of a seed and a step, int64 [rows]."""
    return _mixed_64(_mixed_64(seeds + GOLDEN) + steps * GOLDEN)


def gumbel(key: Tensor, counters: Tensor) -> Tensor:
    """Return Gumbel noise, float32 [rows, n], for each number in `counters` [n] or [rows, n] under
    a key [rows]. It is finite."""
    low, high = (key & WORD)[:, None], ((key >> 32) & WORD)[:, None]
    bits = _mixed_32(_mixed_32(counters ^ low) ^ high)
    # Small values make large noise, so they need the resolution: they have all bits of a float.
    uniform = ((bits >> 1).float() + 0.5) * 2.0**-31
    return -(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24))).log()


def _mixed_64(words: Tensor) -> Tensor:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    words = (words ^ ((words >> 30) & (2**34 - 1))) * -4658895280553007687
    words = (words ^ ((words >> 27) & (2**37 - 1))) * -7723592293110705685
    return words ^ ((words >> 31) & (2**33 - 1))


def _mixed_32(words: Tensor) -> Tensor:
    """Mix the lower 32 bits of int64 words (the finalizer of MurmurHash3), for words of 32 bits."""
    words = words & WORD
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & WORD
    return words ^ (words >> 16)
