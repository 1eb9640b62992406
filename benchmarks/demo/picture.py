"""The demo's picture: the time that ranks wait as loaded, balanced, and balanced with pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.demo.training import AS_LOADED, DEFAULT, PIECES

WORK, WAIT = "#2a7f9e", "#e3e3e3"
# Title of each arm's panel.
PANELS = {AS_LOADED: "As loaded", DEFAULT: "Balanced", PIECES: "Balanced, with long samples in pieces"}
WIDTH, HEIGHT, DPI = 1200, 700, 100  # pixels


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draws three arms of the replay over one time axis, and writes the picture to `path`."""
    figure = make_figure(summary)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def make_figure(summary: dict[str, Any]) -> Figure:
    """Returns the picture of a summary as a figure."""
    replay = summary["replay"]
    size = (WIDTH / DPI, HEIGHT / DPI)
    figure, axes = plt.subplots(len(PANELS), figsize=size, sharex=True, layout="constrained")
    ends = {arm: sum(max(step) for step in replay[arm]) for arm in PANELS}
    for axis, (arm, name) in zip(axes, PANELS.items(), strict=True):
        _draw_arm(axis, name, replay[arm], ends[AS_LOADED] / ends[arm])
    limit = 1.08 * max(ends.values())
    axes[-1].set_xlim(0, limit)
    axes[-1].set_xticks([tick for tick in axes[-1].get_xticks() if 0 <= tick <= limit])
    axes[-1].set_xlabel("seconds")
    steps = replay[AS_LOADED]
    figure.suptitle(f"{len(steps)} training steps on {len(steps[0])} ranks, the same samples each time")
    patches = [Patch(color=WORK, label="computing"), Patch(color=WAIT, label="waiting for the slowest rank")]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_arm(axis: Axes, name: str, steps: list[list[float]], faster: float) -> None:
    ranks, start = range(len(steps[0])), 0.0
    for seconds in steps:
        longest = max(seconds)
        axis.barh(ranks, [longest] * len(seconds), left=start, color=WAIT, height=0.85)
        axis.barh(ranks, seconds, left=start, color=WORK, height=0.85)
        start += longest
        axis.axvline(start, color="white", linewidth=2)
    waiting = 1 - sum(map(sum, steps)) / (start * len(steps[0]))
    gain = "" if faster == 1.0 else f", {faster:.2f}× as fast"
    axis.set_title(f"{name}: {waiting:.0%} of the time waiting{gain}", loc="left", fontsize=13)
    axis.text(start, (len(steps[0]) - 1) / 2, f"  {start:.1f} s", va="center", fontsize=12)
    axis.set_yticks([0, len(steps[0]) - 1], ["rank 0", f"rank {len(steps[0]) - 1}"])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
