"""The one picture: who works and who waits, and losses that are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

WORK, WORK_OF_ODD_STEPS, WAIT = "#2a7f9e", "#63b3cc", "#dcdcdc"
SECOND_LOSS = "#d1495b"


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draws the replay's arms over one time axis, and below them the loss curves of the training run."""
    replay = summary["replay"]
    ends = {arm: sum(max(step) for step in steps) for arm, steps in replay.items()}
    size, heights = (9, 2.3 * len(replay) + 2.6), [1.0] * len(replay) + [0.9]
    figure, axes = plt.subplots(len(replay) + 1, figsize=size, height_ratios=heights, layout="constrained")
    for axis, (arm, steps) in zip(axes, replay.items(), strict=False):
        _draw_arm(axis, arm, steps, ends, max(ends.values()))
    axes[len(replay) - 1].set_xlabel("seconds of the replay")
    patches = [Patch(color=WORK, label="work, measured"), Patch(color=WAIT, label="waiting for the slowest")]
    axes[0].legend(handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
    _draw_losses(axes[-1], summary)
    steps = replay["as loaded"]
    title = f"{len(steps)} steps of {len(steps[0])} ranks: the same samples, placed differently"
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_arm(axis: Axes, arm: str, steps: list[list[float]], ends: dict[str, float], longest: float) -> None:
    start = 0.0
    for step, seconds in enumerate(steps):
        ranks = range(len(seconds))
        color = WORK if step % 2 == 0 else WORK_OF_ODD_STEPS
        axis.barh(ranks, [max(seconds)] * len(seconds), left=start, color=WAIT, height=0.8)
        axis.barh(ranks, seconds, left=start, color=color, height=0.8)
        start += max(seconds)
    idle = 1 - sum(map(sum, steps)) / (start * len(steps[0]))
    axis.axvline(start, color="black", linewidth=1.2)
    axis.text(start, (len(steps[0]) - 1) / 2, f" {start:.1f} s", va="center", fontsize=10)
    faster = ends["as loaded"] / ends[arm]
    gain = "" if arm == "as loaded" else f", {faster:.2f}× as fast"
    axis.set_title(f"{arm}: {idle:.0%} of the time waiting{gain}", loc="left", fontsize=10)
    axis.set_xlim(0, longest * 1.07)
    axis.set_yticks(range(len(steps[0])), [f"rank {rank}" for rank in range(len(steps[0]))], fontsize=7)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _draw_losses(axis: Axes, summary: dict[str, Any]) -> None:
    difference = max(arm["max_relative_loss_difference"] for arm in summary["balanced"].values())
    colors = (WORK, SECOND_LOSS, "black", "gold", "green")
    styles = zip(colors, (4.0, 2.5, 1.5, 0.8, 0.6), ("-", "--", ":", "-", "-."), strict=True)
    for (name, losses), (color, width, line) in zip(summary["losses"].items(), styles, strict=True):
        axis.plot(losses, color=color, linewidth=width, linestyle=line, label=name)
    axis.set_title(
        f"training on {summary['ranks']} ranks: largest relative difference of the losses {difference:.0e}",
        loc="left",
        fontsize=10,
    )
    axis.set_xlabel("training step")
    axis.set_ylabel("global loss")
    axis.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    axis.spines[["top", "right"]].set_visible(False)
