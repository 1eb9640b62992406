"""Charts as inline SVG; the page's style sheet colours them by class, in light and in dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from commons.advisor.advice import LengthSummary
from commons.advisor.prediction import Case
from commons.advisor.strategies import AS_LOADED

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 12, 38


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to places in the chart, and the values that get a label."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]

    def __call__(self, value: float) -> float:
        """Where a value is."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @staticmethod
    def of_heights(low: float, high: float) -> Axis:
        """A vertical axis of round values that reaches `high`."""
        step = _round_step((high - low) / 4)
        count = max(math.ceil((high - low) / step - 1e-9), 1)
        ticks = [low + number * step for number in range(count + 1)]
        return Axis(low, ticks[-1], HEIGHT - BOTTOM, TOP, ticks)

    @staticmethod
    def of_widths(low: float, high: float) -> Axis:
        """A horizontal axis that ends at `high`, with some round values."""
        step = _round_step((high - low) / 4)
        ticks = [low + number * step for number in range(int((high - low) / step + 1e-9) + 1)]
        return Axis(low, high, LEFT, WIDTH - RIGHT, ticks)


def length_histogram(lengths: LengthSummary) -> str:
    """How many samples have which length, on a logarithmic scale."""
    round_lengths = [0, *(10**power for power in range(len(str(lengths.largest))))]
    ticks = [math.log2(length + 1) for length in round_lengths]
    x = Axis(0, math.log2(lengths.edges[-1] + 1), LEFT, WIDTH - RIGHT, ticks)
    y = Axis.of_heights(0, max(lengths.counts))
    bars = []
    for count, low, high in zip(lengths.counts, lengths.edges, lengths.edges[1:], strict=False):
        start, end = x(math.log2(low + 1)), x(math.log2(high + 1))
        label = f"{count:,} samples of length {low:,}" + (f" to {high - 1:,}" if high - 1 > low else "")
        bars.append(
            f'<rect class="fill data" x="{start:.1f}" y="{y(count):.1f}" width="{end - start - 0.8:.1f}" '
            f'height="{y(0) - y(count):.1f}"><title>{escape(label)}</title></rect>'
        )
    median = x(math.log2(lengths.median + 1))
    # On the side where there is room for it.
    side, gap = ("end", -4) if median > WIDTH / 2 else ("start", 4)
    marks = [
        f'<line class="mark" x1="{median:.1f}" x2="{median:.1f}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text class="ink {side}" x="{median + gap:.1f}" y="{TOP}">median {lengths.median:,.0f}</text>',
    ]
    described = (
        f"Histogram of {lengths.samples:,} lengths from {lengths.smallest:,} to {lengths.largest:,}; half "
        f"are at most {lengths.median:,.0f}, 99% at most {lengths.percentile_99:,.0f}."
    )
    labels = [f"{length:,}" for length in round_lengths]
    body = [*_heights(y, _short), *_widths(x, labels, "length, logarithmic"), *bars, *marks]
    return _svg("Histogram of lengths", described, body)


def rank_loads(case: Case, name: str) -> str:
    """Loads of one step's ranks ÷ their mean, the heaviest first, as loaded and by a strategy.

    The step is the one that is in the middle, if they are ordered by imbalance as loaded.
    """
    before, after = (_relative(case, of) for of in (AS_LOADED, name))
    step = int(np.argsort(before.max(1), kind="stable")[case.num_steps // 2])
    loads = [np.sort(of[step])[::-1] for of in (before, after)]
    x = Axis.of_widths(0, case.num_ranks)
    y = Axis.of_heights(0, max(float(of.max()) for of in loads))
    shapes = [f'<path class="fill as_loaded" d="{_steps(loads[0], x, y)}"/>']
    shapes.append(f'<path class="line {name}" d="{_steps(loads[1], x, y, closed=False)}"/>')
    described = (
        f"Loads of {case.num_ranks} ranks in one step: the heaviest has {loads[0][0]:.2f} × the mean as "
        f"loaded and {loads[1][0]:.2f} × as balanced, the lightest {loads[0][-1]:.2f} × and "
        f"{loads[1][-1]:.2f} ×."
    )
    labels = [f"{tick:,.0f}" if float(tick).is_integer() else "" for tick in x.ticks]
    body = [*_heights(y, _plain), *_widths(x, labels, "ranks, the heaviest first"), *shapes]
    return _svg(f"Load per rank of {case.num_ranks} ranks", described, body)


def speedups(cases: Sequence[Case]) -> str:
    """Speedup of each strategy over the number of ranks, on a logarithmic scale."""
    powers = [math.log2(case.num_ranks) for case in cases]
    x = Axis(0.7, max(powers) + 0.3, LEFT, WIDTH - RIGHT, powers)
    highest = max(outcome.speedup for case in cases for outcome in case.outcomes)
    lowest = min(outcome.speedup for case in cases for outcome in case.outcomes)
    y = Axis.of_heights(math.floor(min(lowest, 1)), max(highest, 1.1))
    names = [outcome.strategy.name for outcome in cases[0].outcomes[1:]]
    shapes = []
    for number, name in enumerate(names):
        points = [
            (x(power), y(case.outcomes[number + 1].speedup), case)
            for power, case in zip(powers, cases, strict=True)
        ]
        path = "M" + " L".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
        shapes.append(f'<path class="line {name}" d="{path}"/>')
        for px, py, case in points:
            outcome = case.outcomes[number + 1]
            label = f"{outcome.strategy.title}, {case.num_ranks} ranks: {outcome.speedup:.2f} ×"
            shapes.append(
                f'<circle class="fill dot {name}" cx="{px:.1f}" cy="{py:.1f}" r="2.6">'
                f"<title>{escape(label)}</title></circle>"
            )
    last = cases[-1]
    described = f"Speedup over as loaded, from {cases[0].num_ranks} to {last.num_ranks} ranks. At the end: "
    described += ", ".join(
        f"{outcome.strategy.name} {outcome.speedup:.2f} ×" for outcome in last.outcomes[1:]
    )
    labels = [f"{case.num_ranks:,}" for case in cases]
    body = [*_heights(y, lambda tick: f"{_plain(tick)} ×"), *_widths(x, labels, "ranks"), *shapes]
    return _svg("Speedup over ranks", described, body)


def _relative(case: Case, name: str) -> np.ndarray:
    """float64 `[steps, ranks]`: loads ÷ the mean load of the step."""
    outcome = case.outcome(name)
    assert outcome is not None
    means = outcome.loads.mean(1, keepdims=True)
    return outcome.loads / np.where(means > 0, means, 1)


def _steps(loads: np.ndarray, x: Axis, y: Axis, closed: bool = True) -> str:
    """A path along the tops of bars without gaps, down to the axis if it is closed."""
    tops = [
        f"H{x(rank + 1):.2f}" if rank == 0 else f"V{y(load):.2f} H{x(rank + 1):.2f}"
        for rank, load in enumerate(loads)
    ]
    start = f"M{x(0):.2f},{y(loads[0]):.2f} "
    return start + " ".join(tops) + (f" V{y(0):.2f} H{x(0):.2f} Z" if closed else "")


def _heights(axis: Axis, label: Callable[[float], str]) -> list[str]:
    """Grid lines, and their values to the left."""
    lines = []
    for tick in axis.ticks:
        at = axis(tick)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(f'<text class="label end" x="{LEFT - 5}" y="{at + 3.5:.1f}">{label(tick)}</text>')
    return lines


def _widths(axis: Axis, labels: Sequence[str], title: str) -> list[str]:
    """Values below the chart, and what they are."""
    lines = [
        f'<text class="label middle" x="{axis(tick):.1f}" y="{HEIGHT - BOTTOM + 14}">{label}</text>'
        for tick, label in zip(axis.ticks, labels, strict=True)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*lines, f'<text class="label middle" x="{middle:.1f}" y="{HEIGHT - 6}">{escape(title)}</text>']


def _svg(title: str, described: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}. {escape(described)}">'
        + "".join(body)
        + "</svg>"
    )


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, no less than `least`."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _short(value: float) -> str:
    """With k or M for thousands and millions."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def _plain(value: float) -> str:
    return f"{value:.4g}"
