"""Renders the answer as one self-contained HTML page, from the template `page.html`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import jinja2
import numpy as np

from . import figures
from .advice import Advice, Recommendation
from .command_line import CHART_RANKS
from .prediction import Case
from .samples import SampleLengths
from .strategies import AS_LOADED, REBALANCE

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 390, 12, 202  # edges of the area between the axes
_BINS = 60


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to coordinates, with labeled ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    labels: Sequence[str]

    def __call__(self, value: float) -> float:
        """Returns the coordinate of a value."""
        at = self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)
        return round(at, 2)

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Coordinate and label of each tick."""
        return [(self(tick), label) for tick, label in zip(self.ticks, self.labels, strict=True)]


@dataclass(frozen=True)
class Chart:
    """A chart. A class is the name of a strategy, and the style sheet gives it a color."""

    caption: str
    x: Axis
    y: Axis
    x_title: str
    legend: Sequence[tuple[str, str]] = ()  # class, title
    bars: Sequence[tuple[float, float, float, str]] = ()  # x, width, y of the top, tooltip
    mark: tuple[float, str] | None = None  # x and text of a vertical line
    areas: Sequence[tuple[str, str]] = ()  # class, path
    lines: Sequence[tuple[str, str]] = ()  # class, path
    dots: Sequence[tuple[str, float, float, str]] = ()  # class, x, y, tooltip


def html_page(advice: Advice) -> str:
    """Returns the page, which is HTML and XML and follows the reader's light or dark color scheme."""
    charts = [_length_histogram(advice.request.samples)]
    if advice.over_ranks:
        charts.append(_speedups(advice.over_ranks))
    charts += [_rank_loads(*each) for each in advice.cases if each[0].ranks > 1]
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(template).render(
        advice=advice,
        charts=charts,
        figures=figures,
        meanings=figures.meanings(case for case, _ in advice.cases),
        over_ranks=_table_over_ranks(advice.over_ranks),
        AS_LOADED=AS_LOADED,
        most_ranks=CHART_RANKS[-1],
        area={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    )


def _length_histogram(samples: SampleLengths) -> Chart:
    """Draws a histogram of the lengths on a logarithmic scale.

    Each bin is wider than the previous one by about the same factor.
    """
    median, longest = samples.summary["median"], int(samples.summary["max"])
    edges = np.unique(np.rint(np.geomspace(1, longest + 2, _BINS + 1)).astype(np.int64) - 1)
    counts, _ = np.histogram(samples.items, bins=edges)
    round_lengths = [0, *(10**power for power in range(len(str(longest))))]
    ticks = [math.log2(length + 1) for length in round_lengths]
    x = Axis(0, math.log2(edges[-1] + 1), LEFT, RIGHT, ticks, [f"{length:,}" for length in round_lengths])
    y = _heights(0, int(counts.max()))
    bars = []
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        start, end = x(math.log2(low + 1)), x(math.log2(high + 1))
        tooltip = f"samples of length {low:,} to {high - 1:,}: {count:,}"
        bars.append((start, round(end - start - 0.8, 2), y(count), tooltip))
    mark = (x(math.log2(median + 1)), f"median {median:,.0f}")
    return Chart("Sequence lengths", x, y, "length, logarithmic", bars=bars, mark=mark)


def _rank_loads(case: Case, recommendation: Recommendation) -> Chart:
    """Draws each rank's load ÷ the mean load in one step, heaviest first, as loaded and balanced.

    The step is the one with the median imbalance as loaded.
    """
    before, after = case.outcomes[AS_LOADED], case.outcomes[recommendation.strategy or REBALANCE]
    step = int(np.argsort(_relative(before.loads).max(1), kind="stable")[case.steps_drawn // 2])
    loads, balanced = (np.sort(_relative(of.loads)[step])[::-1] for of in (before, after))
    ticks = [tick for tick in _round_ticks(0, case.ranks) if tick <= case.ranks]
    x = Axis(0, case.ranks, LEFT, RIGHT, ticks, [f"{n:,.0f}" if float(n).is_integer() else "" for n in ticks])
    y = _heights(0, max(loads[0], balanced[0]))
    return Chart(
        caption=f"Load ÷ mean load, {figures.case_title(case)}, a typical step",
        x=x,
        y=y,
        x_title="ranks, the heaviest first",
        legend=[(of.strategy.name, of.strategy.title) for of in (before, after)],
        areas=[(AS_LOADED, f"{_tops(loads, x, y)} V{y(0)} H{x(0)} Z")],
        lines=[(after.strategy.name, _tops(balanced, x, y))],
    )


def _speedups(cases: Sequence[Case]) -> Chart:
    """Draws the speedup of each strategy over the number of ranks, on a logarithmic scale."""
    powers = [math.log2(case.ranks) for case in cases]
    x = Axis(0.7, max(powers) + 0.3, LEFT, RIGHT, powers, [f"{case.ranks:,}" for case in cases])
    values = [outcome.speedup for case in cases for outcome in case.outcomes.values()]
    y = _heights(math.floor(min(values)), max(*values, 1.1))
    last = cases[-1]
    strategies = [outcome.strategy for outcome in last.outcomes.values()][1:]
    dots = [
        (of.name, x(power), y(speedup), f"{of.title}, {case.ranks} ranks: {speedup:.2f} ×")
        for of in strategies
        for power, case in zip(powers, cases, strict=True)
        for speedup in [case.outcomes[of.name].speedup]
    ]
    paths = [
        (of.name, "M" + " L".join(f"{at},{height}" for name, at, height, _ in dots if name == of.name))
        for of in strategies
    ]
    return Chart(
        caption=f"Speedup over ranks, {last.rows_per_rank} rows each",
        x=x,
        y=y,
        x_title="ranks",
        legend=[(of.name, of.title) for of in strategies],
        lines=paths,
        dots=dots,
    )


def _table_over_ranks(cases: Sequence[Case]) -> list[list[str]]:
    """Returns the figures of the chart of speedups, with one column per strategy."""
    columns = [["ranks", *(f"{case.ranks:,}" for case in cases)]]
    for name, outcome in list(cases[0].outcomes.items())[1:] if cases else []:
        columns.append([outcome.strategy.title, *(f"{case.outcomes[name].speedup:.2f}" for case in cases)])
    return columns


def _relative(loads: np.ndarray) -> np.ndarray:
    """Divides loads, float64 `[steps, ranks]`, by the mean of their step."""
    means = loads.mean(1, keepdims=True)
    return loads / np.where(means > 0, means, 1)


def _tops(loads: np.ndarray, x: Axis, y: Axis) -> str:
    """Returns an SVG path along the tops of adjacent bars."""
    return f"M{x(0)}," + " V".join(f"{y(load)} H{x(rank + 1)}" for rank, load in enumerate(loads))


def _heights(low: float, high: float) -> Axis:
    """Returns a vertical axis with round ticks, from `low` to at least `high`."""
    ticks = _round_ticks(low, high)
    return Axis(low, ticks[-1], BOTTOM, TOP, ticks, [f"{tick:g}" for tick in ticks])


def _round_ticks(low: float, high: float) -> list[float]:
    """Returns values from `low` to `high` or just above, in steps of 1, 2, or 5 times a power of ten."""
    least = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    count = max(math.ceil((high - low) / step - 1e-9), 1)
    return [low + number * step for number in range(count + 1)]
