"""The one picture: how far the largest load is above the mean, and how far it has to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.partition.lengths import LOGNORMAL, ML_100K, ML_100K_NEWEST, ZIPF

HIDDEN_SIZE = 128
TITLES = {
    ML_100K: "MovieLens 100K, whole histories",
    ML_100K_NEWEST: "MovieLens 100K, newest 200 kept",
    LOGNORMAL: "lognormal(5, 1.2), at most 4096",
    ZIPF: "zipf(1.2), at most 4096",
}
COLUMNS = 2
# From Wong's palette, which color-blind readers can tell apart.
IMPOSSIBLE = "#dddddd"


class Line(NamedTuple):
    """How one placement is drawn."""

    name: str
    label: str
    color: str
    marker: str
    width: float
    label_side: str


LINES = {
    "as loaded": Line("as loaded", "as loaded", "#d55e00", "s", 2.0, "center"),
    "karmarkar_karp": Line("KK", "Karmarkar–Karp, equal rows", "#444444", "^", 2.0, "bottom"),
    "refined": Line("ours", "ours: refined", "#0072b2", "o", 2.6, "top"),
}


def draw(placements: list[dict[str, Any]], path: Path) -> None:
    """A panel for each of the lengths that were measured; those of a row have one scale."""
    records = [record for record in placements if record["hidden_size"] == HIDDEN_SIZE]
    names = [name for name in TITLES if any(record["lengths"] == name for record in records)]
    rows = -(-len(names) // COLUMNS)
    figure, axes = plt.subplots(
        rows, COLUMNS, figsize=(11, 3.4 * rows + 1.2), sharey="row", squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=True):
        _draw_lengths(axis, [record for record in records if record["lengths"] == name])
        axis.set_title(TITLES[name], loc="left", fontsize=13, fontweight="bold")
    for axis in axes[:, 0]:
        axis.set_ylabel("largest load ÷ mean load", fontsize=12)
        _, top = axis.get_ylim()
        axis.set_ylim(1 - 0.08 * (top - 1), top)
    for axis in axes[-1]:
        axis.set_xlabel("ranks, 32 histories each", fontsize=12)
    figure.suptitle(
        f"Every step waits for the largest load: 1.0 is perfect (HSTU, d = {HIDDEN_SIZE}; equal rows)",
        fontsize=15,
    )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_lengths(axis: Axes, records: list[dict[str, Any]]) -> None:
    for placement, line in LINES.items():
        of_placement = [record for record in records if record["placement"] == placement]
        ranks = [record["ranks"] for record in of_placement]
        values = [record["imbalance"] for record in of_placement]
        axis.plot(ranks, values, line.marker, ls="-", color=line.color, lw=line.width, ms=7, label=line.label)
        axis.annotate(
            f"{line.name} {values[-1]:.2f}",
            (ranks[-1], values[-1]),
            (9, 0),
            textcoords="offset points",
            va=line.label_side,
            color=line.color,
            fontsize=12,
        )
    bounds = [record["lower_bound"] for record in records if record["placement"] == "refined"]
    axis.fill_between(ranks, 0, bounds, color=IMPOSSIBLE, lw=0, label="impossible for any placement")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [f"{number:,}" for number in ranks], fontsize=11)
    axis.tick_params(axis="y", labelsize=11, labelleft=True)
    axis.spines[["top", "right"]].set_visible(False)
