"""`batch.tokens` and `model.recompute` where the configuration says auto: a step that fits its
accelerator and keeps it busy. What to set if none does."""

import math
import re
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from rlhf.config.sections import Recompute
from rlhf.data.example import num_tokens
from rlhf.engine import gib
from rlhf.errors import RLHFError
from rlhf.launch.garbage import without_collections
from rlhf.memory.estimate import Estimate
from rlhf.memory.fit import LEVELS, MARGIN, StepFit
from rlhf.model.accelerated import recompute_levels

START = 8192
"""Tokens of a micro-batch to begin with."""
ENOUGH = 4e11
"""Parameters of a layer times tokens of a micro-batch from which twice the tokens gain less than
5 %: the device then takes longer for a layer than the host (measured on an H200: 57 % from 8,192 to
32,768 tokens at 0.5B, 7 % from 8,192 to 16,384 at 1.5B: benchmarks/NOTES.md, Small
micro-batches)."""
AMPLE = 0.8
"""Share of an accelerator's memory up to which the tokens of a micro-batch are raised."""
RECOMPUTE_COST = {"selective": 0.02, "full": 0.25}
"""Time that a level adds to a step, as a share of it, measured on an H200 (benchmarks/RESULTS.md,
Long rows)."""
HALVING_COST = 0.05
"""Time that half the tokens add while a micro-batch keeps the device busy (`ENOUGH`), at most."""
LEAST_TOKENS = 1024
"""Fewer tokens of a micro-batch are not chosen."""
ADVISED = 0.9
"""Share of the estimate that an advised setting takes at most: memory ran out although the estimate
fitted, so that it was too small."""
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


def smaller(
    fit: StepFit, configured: Choice, *, any_tokens: bool, any_setting: bool = False
) -> list[Choice]:
    """Return the choices that take less, those that add least time first. With `any_setting` they
    may differ from what the configuration sets."""
    levels: list[Recompute] = []
    if any_setting or configured.recompute == "auto":
        levels = recompute_levels(fit.config.model)
    if configured.recompute in levels:
        levels = levels[levels.index(configured.recompute) + 1 :]
    least = max(fit.largest, LEAST_TOKENS)
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
        if layout.configured or any_setting
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
    tree, example = 1, fit.examples[0].lengths.mean()
    if fit.trainer.needs_rollout():  # Its rows have no answers yet.
        made = fit.trainer.rollout_shape(fit.examples[0], fit.config.data.max_tokens)
        tree = example = num_tokens(made)
    step = example * fit.config.batch.size / fit.mesh.data.size
    tokens, larger = configured.tokens, list[Choice]()
    while tokens < step and tokens * layer < ENOUGH:
        # As many whole trees as begin in them: no tree that fits is divided.
        tokens = 2 * tokens if 2 * tokens < tree else -(-2 * tokens // tree) * tree
        if estimate.peak_with(tokens) > most:
            break
        larger.append(configured._replace(tokens=tokens))
    # `peak_with` scales the estimate; only a rehearsal sees what does not grow with the tokens.
    chosen, peak = first_that_fits(fit, reversed(larger), limit=most)
    if chosen is None or peak > most:
        return configured, ""
    few, many = math.ceil(step / chosen.tokens), math.ceil(step / configured.tokens)
    return chosen, (
        f"tokens     {chosen.tokens} per micro-batch: about {few} micro-batch"
        f"{'es' if few > 1 else ''} per step instead of {many} (smaller ones leave the device "
        "waiting for the host)"
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


def advice(fit: StepFit) -> str:
    """Return what to set so that a step fits, whatever the configuration sets now: the fastest
    choice, else the one that takes least."""
    assert fit.peak is not None
    configured = Choice(*fit.token_settings, fit.chosen.name)
    limit = min(ADVISED * fit.peak, MARGIN * (fit.mesh.memory or math.inf))
    choices = smaller(fit, configured, any_tokens=True, any_setting=True)
    chosen, peak = first_that_fits(fit, choices, limit=limit)
    if chosen is None or peak > ADVISED * fit.peak:
        return "train with lora, or use a device with more memory"
    settings = []
    if chosen.tokens != configured.tokens:
        settings.append(f"batch.tokens {chosen.tokens}")
    if chosen.recompute != configured.recompute:
        settings.append(f"model.recompute {chosen.recompute}")
    if chosen.layout != configured.layout:
        settings.append(fit.under(*chosen).chosen.settings)
    return f"set {' and '.join(settings)} (about {gib(peak)} GiB)"


def memory_error(fit: StepFit, cause: BaseException) -> RLHFError:
    """Return the error of a run whose accelerator ran out of memory."""
    where = f"out of memory on {fit.mesh.device}"
    if fit.mesh.memory:
        where += f", which has {gib(fit.mesh.memory)} GiB"
    if wanted := re.search(r"ried to allocate ([\d.]+ \w+)", str(cause)):
        where += f", when allocating {wanted.group(1)} more"
    if fit.peak is None:
        return RLHFError(f"{where}: lower batch.tokens, or set model.recompute to full")
    return RLHFError(
        f"{where}; a step was estimated at {gib(fit.peak)} GiB: {advice(fit)}; `rlhf plan` lists "
        "what fits"
    )
