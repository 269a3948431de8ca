"""Curves of several runs as the points of one SVG chart, with few enough points for a page."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter

from attrs import frozen

from rlhf_tools.recorded import Curve
from rlhf_tools.template import number

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 30, 10, 28
"""Space around the curves, for the axes' numbers."""
BUCKETS = 250
"""Of each bucket of steps a curve keeps its smallest and its largest value."""
SMOOTHED = 60
"""Noisy curves of more points have a smoothed line above a faint one."""
NOISY = 4.0
"""A curve is noisy if its way up and down is so many times its range."""
SPAN = 0.02
"""Share of a curve's points over which it is smoothed."""


@frozen
class Line:
    """One polyline of a chart, in its coordinates."""

    run: int
    """Number of the run, which chooses the colour."""
    kind: str
    """`train`, `raw` (below a smoothed one) or `eval`."""
    points: Sequence[tuple[float, float]]

    def __str__(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@frozen(kw_only=True)
class Chart:
    """One metric of all runs."""

    name: str
    lines: Sequence[Line]
    domain: tuple[float, float, float, float]
    """Steps and values at the edges: left, right, bottom, top."""
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]


def chart(name: str, runs: Sequence[Mapping[str, Curve]]) -> Chart:
    """Return the chart of a metric in training and on the held-out rows."""
    curves = [(run, "train", curves.get(name, [])) for run, curves in enumerate(runs)]
    curves += [(run, "eval", curves.get(f"eval/{name}", [])) for run, curves in enumerate(runs)]
    every = [point for *_, curve in curves for point in curve]
    first, last = min(every)[0], max(every)[0]
    low, high = min(value for _, value in every), max(value for _, value in every)
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    domain = (first, max(last, first + 1), low - margin, high + margin)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - domain[0]) / (domain[1] - domain[0])

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (domain[3] - value) / (domain[3] - domain[2])

    lines = []
    for run, kind, curve in curves:
        smooth = kind == "train" and is_noisy(curve)
        parts = {"raw": curve, "train": smoothed(curve)} if smooth else {kind: curve}
        lines += [
            Line(run, part, [(x(step), y(value)) for step, value in thinned(points)])
            for part, points in parts.items()
            if points
        ]
    x_ticks = [(x(tick), _tick(tick)) for tick in ticks(*domain[:2], most=6)]
    y_ticks = [(y(tick), _tick(tick)) for tick in ticks(*domain[2:], most=5)]
    return Chart(name=name, lines=lines, domain=domain, x_ticks=x_ticks, y_ticks=y_ticks)


def thinned(curve: Curve) -> Curve:
    """Return at most two points of each bucket: the smallest and the largest value."""
    if len(curve) <= 2 * BUCKETS:
        return curve
    size = math.ceil(len(curve) / BUCKETS)
    kept: Curve = []
    for start in range(0, len(curve), size):
        part = curve[start : start + size]
        ends = {min(part, key=itemgetter(1)), max(part, key=itemgetter(1))}
        kept += sorted(ends)
    return kept


def is_noisy(curve: Curve) -> bool:
    """Return whether a curve is read more easily when it is smoothed."""
    values = [value for _, value in thinned(curve)]
    way = sum(abs(after - before) for before, after in pairwise(values))
    return len(curve) > SMOOTHED and way > NOISY * (max(values) - min(values))


def smoothed(curve: Curve) -> Curve:
    """Return a moving average with exponentially decaying weights that add up to 1, of the means of
    the buckets."""
    size = math.ceil(len(curve) / BUCKETS)
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    means = [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
    decay = 1 - 1 / max(2.0, SPAN * len(means))
    total, weight, result = 0.0, 0.0, []
    for step, value in means:
        total, weight = decay * total + value, decay * weight + 1
        result.append((step, total / weight))
    return result


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Return round numbers between two, at equal distances."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [place * size for place in range(first, last + 1)]


def _tick(value: float) -> str:
    return number(value) if abs(value) >= 1000 else f"{value:.6g}"
