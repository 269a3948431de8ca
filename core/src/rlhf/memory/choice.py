"""`batch.tokens` and `model.recompute` where the configuration says auto: a step that fits its
accelerator and keeps it busy."""

import math
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from rlhf.config.sections import Recompute
from rlhf.engine import gib
from rlhf.launch.garbage import without_collections
from rlhf.memory.estimate import Estimate
from rlhf.memory.fit import LEVELS, MARGIN, TOKENS_STEP, StepFit
from rlhf.model.accelerated import recompute_levels

START = 8192
"""Tokens of a micro-batch to begin with."""
ENOUGH = 4e11
"""Parameters of a layer times tokens of a micro-batch from which twice the tokens gain less than
5 %: the device then takes longer for a layer than the host (measured on an H200: 57 % from 8,192 to
32,768 tokens at 0.5B, 7 % from 8,192 to 16,384 at 1.5B)."""
AMPLE = 0.8
"""Share of an accelerator's memory up to which the tokens of a micro-batch are raised."""
RECOMPUTE_COST = {"selective": 0.02, "full": 0.25}
"""Time that a level adds to a step, as a share of it, measured on an H200."""
HALVING_COST = 0.05
"""Time that half the tokens add while a micro-batch keeps the device busy (`ENOUGH`), at most."""
IDLE_COST = 1.0
"""Time that half the tokens may add where the device waits for the host."""


class Choice(NamedTuple):
    """Values for `batch.tokens` and `model.recompute`, and the layout."""

    tokens: int
    recompute: Recompute
    layout: str = ""


@without_collections()
def choose(fit: StepFit, *, any_tokens: bool) -> tuple[Choice, str]:
    """Return the fastest choice with which a step fits, else the one that takes least, and the line
    that explains it; the configured values, without a line, if they fit or nothing is known.

    The tokens of a micro-batch may change with `any_tokens`, recomputation if it is auto, the
    layout if several are configured. None of them changes what is learnt. Under FP8 the tokens
    would, so that they are never raised.
    """
    on_accelerator = fit.mesh.memory and fit.mesh.device.type != "cpu"
    if not on_accelerator or fit.estimate is None:
        return Choice(*fit.token_settings), ""
    configured = Choice(*fit.token_settings, fit.chosen.name)
    whole = fit.estimate.peak
    limit = MARGIN * fit.mesh.memory
    if whole <= limit:
        raises = any_tokens and fit.config.model.fp8 is None
        return _more_tokens(fit, fit.estimate, configured) if raises else (configured, "")
    choices = smaller(fit, configured, any_tokens=any_tokens)
    chosen, peak = first_that_fits(fit, choices, limit=limit)
    if chosen is None or peak >= whole:
        return configured, ""
    return chosen, _explain_smaller(
        configured, chosen, whole=whole, peak=peak, memory=fit.mesh.memory
    )


def smaller(fit: StepFit, configured: Choice, *, any_tokens: bool) -> list[Choice]:
    """Return the choices that take less, those that add least time first."""
    levels: list[Recompute] = []
    if configured.recompute == "auto":
        levels = recompute_levels(fit.config.model)
    least = max(fit.largest, TOKENS_STEP)
    halves = (configured.tokens >> by for by in range(1, configured.tokens.bit_length()))
    fewer = [tokens for tokens in halves if tokens >= least] if any_tokens else []
    deepest = levels[-1] if levels else configured.recompute
    costs = [(RECOMPUTE_COST[level], Choice(configured.tokens, level)) for level in levels]
    costs += [
        (HALVING_COST, Choice(tokens, configured.recompute))
        for tokens in fewer
        if tokens * fit.layer >= ENOUGH
    ]
    costs += [(IDLE_COST, Choice(tokens, deepest)) for tokens in fewer]
    in_layouts = [
        (cost + layout.cost, choice._replace(layout=layout.name))
        for layout in fit.layouts
        if layout.configured
        for cost, choice in [(0.0, configured), *costs]
    ]
    in_layouts.sort(key=itemgetter(0))
    return list(dict.fromkeys(choice for _, choice in in_layouts))


def first_that_fits(
    fit: StepFit, choices: Iterable[Choice], *, limit: float
) -> tuple[Choice | None, float]:
    """Return the first choice whose step takes at most `limit` bytes, else the one that takes
    least, and its peak."""
    chosen, least = None, math.inf
    for choice in choices:
        peak = fit.under(*choice).peak
        if peak is not None and peak < least:
            chosen, least = choice, peak
        if least <= limit:
            break
    return chosen, least


def _more_tokens(fit: StepFit, estimate: Estimate, configured: Choice) -> tuple[Choice, str]:
    """Double the tokens while a rank takes a step in several micro-batches, its device waits for
    the host, and the peak leaves ample room."""
    most, layer = AMPLE * fit.mesh.memory, fit.layer
    step = fit.examples[0].lengths.mean() * fit.config.batch.size / fit.mesh.data.size
    tokens, larger = configured.tokens, list[Choice]()
    while tokens < step and tokens * layer < ENOUGH and estimate.peak_with(2 * tokens) <= most:
        tokens *= 2
        larger.append(configured._replace(tokens=tokens))
    # `peak_with` scales the estimate; only a rehearsal sees what does not grow with the tokens.
    chosen, peak = first_that_fits(fit, reversed(larger), limit=most)
    if chosen is None or peak > most:
        return configured, ""
    few, many = math.ceil(step / chosen.tokens), math.ceil(step / configured.tokens)
    return chosen, (
        f"tokens     {chosen.tokens} per micro-batch: about {few} micro-batch{'es' * (few > 1)} "
        f"per step instead of {many} (smaller ones leave the device waiting for the host)"
    )


def _explain_smaller(
    configured: Choice, chosen: Choice, *, whole: int, peak: float, memory: int
) -> str:
    """Return the line that explains a choice that takes less."""
    parts: dict[str, str] = {}
    if chosen.layout != configured.layout:
        parts[chosen.layout] = chosen.layout
    if chosen.recompute != configured.recompute:
        parts[chosen.recompute] = LEVELS[chosen.recompute]
    label = "layout" if chosen.layout in parts else "recompute" if parts else "tokens"
    if chosen.tokens != configured.tokens:
        tokens = f"{chosen.tokens} tokens per micro-batch"
        parts[tokens if parts else str(chosen.tokens)] = tokens
    return (
        f"{label:<10} {', '.join(parts)}: with {' and '.join(parts.values())} a step takes "
        f"{gib(peak)} of {gib(memory)} GiB, instead of {gib(whole)}"
    )
