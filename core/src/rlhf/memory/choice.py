"""What a run chooses where the configuration says auto: tokens at once, and what is computed again
in backward, so that a step fits its accelerator and keeps it busy."""

import math
from collections.abc import Iterator

from attrs import evolve, frozen

from rlhf.engine import gib
from rlhf.memory.fit import LEVELS, MARGIN, ROUND, Headroom

START = 8192
"""Tokens at once where nothing speaks for more or fewer."""
ENOUGH = 4e11
"""A layer's weights times tokens at once from which on twice the tokens gain less than 5 %: the
device then takes longer for a layer than the host (measured on an H200: 57 % from 8,192 to 32,768
tokens at 0.5B, 7 % from 8,192 to 16,384 at 1.5B)."""
AMPLE = 0.8
"""Share of an accelerator's memory up to which tokens at once are raised."""


@frozen
class Choice:
    """Values for `batch.tokens` and `model.recompute`."""

    tokens: int
    recompute: str

    def of(self, asked: Headroom) -> Headroom:
        """The question with these values."""
        return asked.under(tokens=self.tokens, recompute=self.recompute)


def choose(asked: Headroom, *, any_tokens: bool) -> tuple[Choice, str]:
    """The fastest way in which a step fits, else the one that takes least, and the line that says
    why; as given, with no line, where that fits or where the memory is not known.

    Tokens at once are free if `any_tokens`, what is computed again if it is auto. None of this
    changes what is learnt; under FP8, where tokens at once do, there are never more of them.
    """
    given = Choice(asked.config.batch.budget, asked.config.model.recompute)
    whole = asked.peak()
    if whole is None or not asked.mesh.memory or asked.mesh.device.type == "cpu":
        return given, ""
    limit = MARGIN * asked.mesh.memory
    if whole <= limit:
        grows = any_tokens and asked.config.model.fp8 is None
        return _larger(asked, given) if grows else (given, "")
    chosen, least = given, whole
    for other in dict.fromkeys(_leaner(asked, given, any_tokens=any_tokens)):
        peak = other.of(asked).peak()
        if peak is not None and peak < least:
            chosen, least = other, peak
        if least <= limit:
            break
    if chosen == given:
        return given, ""
    return chosen, _told(given, chosen, whole=whole, least=least, memory=asked.mesh.memory)


def _larger(asked: Headroom, given: Choice) -> tuple[Choice, str]:
    """Twice the tokens, and so on, while a rank takes a step in several micro-batches, its device
    waits for the host and the peak stays ample."""
    found, most = asked.rehearsed, AMPLE * asked.mesh.memory
    step = asked.examples[0].lengths.mean() * asked.config.batch.size / asked.mesh.world
    tokens = given.tokens
    while (
        tokens < step
        and tokens * found.shape.mean_layer < ENOUGH
        and found.estimate.peak_with(2 * tokens) <= most
    ):
        tokens *= 2
    while tokens > given.tokens and (asked.under(tokens=tokens).peak() or math.inf) > most:
        tokens //= 2
    if tokens == given.tokens:
        return given, ""
    few, many = math.ceil(step / tokens), math.ceil(step / given.tokens)
    return evolve(given, tokens=tokens), (
        f"tokens     {tokens} at once: a step in about {few} micro-batch{'es' * (few > 1)} instead "
        f"of {many}, since small ones would wait for the host"
    )


def _leaner(asked: Headroom, given: Choice, *, any_tokens: bool) -> Iterator[Choice]:
    """Ways that take less, those first that cost less time: gates again some 2 %, half the tokens
    up to 5 % where a layer keeps the device busy, layers again a quarter."""
    levels = asked.levels() if given.recompute == "auto" else []
    fewer = _halves(given.tokens, max(asked.largest_example(), ROUND)) if any_tokens else []
    layer = asked.rehearsed.shape.mean_layer
    yield from (evolve(given, recompute=level) for level in levels if level == "selective")
    yield from (evolve(given, tokens=tokens) for tokens in fewer if tokens * layer >= ENOUGH)
    yield from (evolve(given, recompute=level) for level in levels if level != "selective")
    deepest = levels[-1] if levels else given.recompute
    yield from (Choice(tokens, deepest) for tokens in fewer)


def _halves(tokens: int, least: int) -> list[int]:
    """Half of it, a quarter and so on, down to `least`."""
    return [tokens >> by for by in range(1, tokens.bit_length()) if tokens >> by >= least]


def _told(given: Choice, chosen: Choice, *, whole: int, least: int, memory: int) -> str:
    """The line of a choice that takes less."""
    at_once = f"{chosen.tokens} tokens at once"
    short, long = [], []
    if chosen.recompute != given.recompute:
        short.append(chosen.recompute)
        long.append(LEVELS[chosen.recompute])
    name = "recompute" if short else "tokens"
    if chosen.tokens != given.tokens:
        short.append(at_once if short else str(chosen.tokens))
        long.append(at_once)
    return (
        f"{name:<10} {', '.join(short)}: a step would take {gib(whole)} of {gib(memory)} GiB, and "
        f"{gib(least)} with {', '.join(long)}"
    )
