"""The demo's figures as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.demo.training import AS_LOADED, DEFAULT
from benchmarks.markdown import markdown_table

Record = dict[str, Any]
TITLES = {"hstu": "HSTU", "sid_gr": "SID-GR"}
# Of an arm, over all steps.
ROWS: dict[str, Callable[[Record], str]] = {
    "imbalance": lambda arm: f"{arm['untrimmed']['imbalance_after']:.3f}",
    "step": lambda arm: f"{arm['untrimmed']['seconds_per_step'] * 1e3:.0f} ms",
    "speedup (95% of resampled runs)": lambda arm: _speedup(arm, 3),
    "speedup predicted from the loads": lambda arm: f"{arm['untrimmed']['speedup_predicted']:.3f}",
    "speedup, trimmed mean": lambda arm: f"{arm['speedup']:.3f}",
    "bytes moved": lambda arm: f"{arm['untrimmed']['share_of_bytes_moved']:.0%}",
    "sent per rank and step": lambda arm: f"{arm['untrimmed']['bytes_sent_per_step'] / 1e3:.0f} kB",
    "wait for the plan": lambda arm: f"{arm['untrimmed']['plan_wait_seconds_per_step'] * 1e3:.2f} ms",
    "samples cut per step": lambda arm: f"{arm['untrimmed']['samples_cut_per_step']:.2f}",
    "keys and values fetched per rank and step": lambda arm: (
        f"{arm['untrimmed']['bytes_fetched_per_step'] / 1e6:.1f} MB"
    ),
    "largest relative difference of a step's loss": lambda arm: f"{arm['max_relative_loss_difference']:.0e}",
}


def all_tables(summaries: Mapping[str, Record]) -> dict[str, str]:
    """Returns Markdown by table: one of each model, and those of the README.

    Args:
        summaries: `summary.json` of each model of `TITLES`.
    """
    return {
        **{model: model_table(summary) for model, summary in summaries.items()},
        "speedup": _speedup_table(summaries),
        "prediction": "; ".join(_prediction(TITLES[model], summary) for model, summary in summaries.items()),
        "machine": _machine(summaries),
        "duration": duration(sum(summaries["hstu"]["seconds"].values())),
    }


def model_table(summary: Record) -> str:
    """Returns a row for each figure of one model, and a column for each arm."""
    arms = summary["balanced"]
    first = next(iter(arms.values()))["untrimmed"]
    as_loaded = {
        "imbalance": f"{first['imbalance_before']:.3f}",
        "step": f"{first['seconds_per_step_as_loaded'] * 1e3:.0f} ms",
    }
    rows = [[name, as_loaded.get(name, ""), *map(cell, arms.values())] for name, cell in ROWS.items()]
    rows.append(["speedup over pieces by FLOPs", "", *(_over_pieces_by_flops(arm) for arm in arms.values())])
    replays = [summary["replay"][name] for name in (AS_LOADED, *arms)]
    ends, ranks = list(map(_seconds, replays)), len(replays[0][0])
    waiting = [1 - sum(map(sum, steps)) / (end * ranks) for steps, end in zip(replays, ends, strict=True)]
    rows += [
        [f"{ranks} ranks replayed", *(f"{end:.1f} s" for end in ends)],
        ["of it waiting", *(f"{share:.0%}" for share in waiting)],
        ["speedup", "", *(f"{ends[0] / end:.2f}" for end in ends[1:])],
    ]
    for name in ("early", "late"):
        of_arms = [summary["pieces"].get(arm, {}).get(name) for arm in arms]
        ratios = [f"{of['predicted_over_measured']:.2f} ({of['pieces']})" if of else "" for of in of_arms]
        rows.append([f"predicted ÷ measured time, {name} pieces (their number)", "", *ratios])
    return markdown_table(["", AS_LOADED, *arms], rows)


def duration(seconds: float) -> str:
    """Returns seconds as minutes, rounded up to halves."""
    halves = math.ceil(seconds / 30)
    return "about a minute" if halves <= 2 else f"about {halves / 2:g} minutes"


def _speedup_table(summaries: Mapping[str, Record]) -> str:
    """Step times of the default, and the speedups of all arms."""
    others = [name for name in summaries["hstu"]["balanced"] if name != DEFAULT]
    rows = []
    for model, summary in summaries.items():
        arms = summary["balanced"]
        of_default = arms[DEFAULT]["untrimmed"]
        milliseconds = [of_default[f"seconds_per_step{when}"] * 1e3 for when in ("_as_loaded", "")]
        speedups = [f"{arms[name]['untrimmed']['speedup']:.2f}×" for name in others]
        rows.append(
            [
                f"{TITLES[model]}, {summary['ranks']} ranks, step",
                *(f"{time:.0f} ms" for time in milliseconds),
                f"**{_speedup(arms[DEFAULT], 2)}**",
                *speedups,
            ]
        )
    for model, summary in summaries.items():
        ends = {name: _seconds(steps) for name, steps in summary["replay"].items()}
        steps = summary["replay"][DEFAULT]
        speedups = [f"{ends[AS_LOADED] / ends[name]:.2f}×" for name in (DEFAULT, *others)]
        rows.append(
            [
                f"{TITLES[model]}, {len(steps[0])} ranks, simulated: {len(steps)} steps",
                *(f"{ends[name]:.1f} s" for name in (AS_LOADED, DEFAULT)),
                f"**{speedups[0]}**",
                *speedups[1:],
            ]
        )
    return markdown_table(["", AS_LOADED, DEFAULT, "speedup (95% CI)", *others], rows)


def _prediction(title: str, summary: Record) -> str:
    measured = summary["balanced"][DEFAULT]["untrimmed"]
    return f"{title} {measured['speedup_predicted']:.2f} × and {measured['speedup']:.2f} ×"


def _machine(summaries: Mapping[str, Record]) -> str:
    machine = summaries["hstu"]["machine"]
    arms = [arm for summary in summaries.values() for arm in summary["balanced"].values()]
    difference = max(arm["max_relative_loss_difference"] for arm in arms)
    torch = machine["torch"].partition("+")[0]
    cores = f"{machine['cores']} CPU cores ({machine['cpu']}, torch {torch}, gloo)"
    return f"{cores}; losses match to {difference:.0e}".replace("e-0", "e-")


def _seconds(steps: list[list[float]]) -> float:
    """Each step lasts as long as its slowest rank."""
    return sum(map(max, steps))


def _over_pieces_by_flops(arm: Record) -> str:
    """The speedup of the arm that has one, in the same steps."""
    measured = arm.get("over_pieces_by_flops")
    return "" if measured is None else _with_interval(measured, 3)


def _speedup(arm: Record, digits: int) -> str:
    return _with_interval(arm["untrimmed"], digits)


def _with_interval(measured: Record, digits: int) -> str:
    low, high = measured["speedup_interval"]
    times = "×" if digits < 3 else ""
    return f"{measured['speedup']:.{digits}f}{times} ({low:.2f}–{high:.2f})"
