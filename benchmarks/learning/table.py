"""The figures of both measurements, and their tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.markdown import markdown_table

Record = dict[str, Any]
# Steps after a change that do not count: costs and speeds have to be learned by then.
STEPS_TO_FOLLOW = 50
# Predictions are fitted to at most this many steps, as those of learned costs are: up to the one whose times
# the planning gather has carried.
STEPS_OF_FIT, STEPS_IN_FLIGHT = 64, 8


def slow_rank_figures(measured: Record) -> list[Record]:
    """A record for each phase, of the steps after those to follow a change."""
    records, first = [], 0
    arms = {
        name: {key: np.array(of[key]) for key in ("step_seconds", "compute_seconds", "speeds")}
        for name, of in measured["arms"].items()
    }
    for phase, _, steps in measured["phases"]:
        counted = slice(first + STEPS_TO_FOLLOW, first + steps)
        record: Record = {"phase": phase, "steps": steps - STEPS_TO_FOLLOW}
        for name, arm in arms.items():
            compute = arm["compute_seconds"][counted]
            record[name] = {
                "step_ms": _ms(arm["step_seconds"][counted].mean()),
                "compute_ms": [_ms(of_rank) for of_rank in compute.mean(0)],
                "imbalance": round(float((compute.max(1) / compute.mean(1)).mean()), 3),
            }
        speeds = arms["learned"]["speeds"][counted]
        record["speeds"] = [np.quantile(of_rank, [0, 0.5, 1]).round(3).tolist() for of_rank in speeds.T]
        times = {name: arm["step_seconds"][counted] for name, arm in arms.items()}
        record["speedup"] = round(float(times["flops"].mean() / times["learned"].mean()), 3)
        record["speedup_quartiles"] = (
            np.quantile(times["flops"] / times["learned"], [0.25, 0.75]).round(3).tolist()
        )
        record["trace"] = arms["learned"]["speeds"][first : first + steps : 4].tolist()
        records.append(record)
        first += steps
    return records


def dense_part_figures(measured: Record) -> Record:
    """Errors of predicted times, and how much ranks' times differ, after the steps to learn."""
    learned, flops, repeated = (measured[name] for name in ("learned", "flops", "repeated"))
    seconds = {name: np.array(of["compute_seconds"])[STEPS_TO_FOLLOW:] for name, of in measured.items()}
    predicted = np.array(learned["predicted_seconds"][STEPS_TO_FOLLOW:])
    identical = np.ones_like(repeated["compute_seconds"])
    return {
        "steps": len(predicted),
        "repeatability": _median_error(
            _predicted_in_proportion(identical, repeated["compute_seconds"]), seconds["repeated"]
        ),
        "error": {
            "learned": _median_error(predicted, seconds["learned"]),
            "flops": _median_error(
                _predicted_in_proportion(np.array(flops["loads"]), flops["compute_seconds"]),
                seconds["flops"],
            ),
        },
        "spread": {
            name: round(float((of.max(1) / of.mean(1) - 1).mean()), 4)
            for name, of in seconds.items()
            if name != "repeated"
        },
        "step_ms": {
            name: _ms(np.mean(measured[name]["step_seconds"][STEPS_TO_FOLLOW:]))
            for name in ("flops", "learned")
        },
    }


def all_tables(figures: Record) -> dict[str, str]:
    """Returns lines of Markdown by table."""
    slow = [
        [
            record["phase"],
            f"{record['flops']['step_ms']:.0f}",
            f"{record['learned']['step_ms']:.0f}",
            "{:.2f} ({:.2f} to {:.2f})".format(record["speedup"], *record["speedup_quartiles"]),
            f"{record['flops']['compute_ms'][0] / record['flops']['compute_ms'][1]:.2f}",
            f"{record['flops']['imbalance']:.3f} / {record['learned']['imbalance']:.3f}",
            " / ".join("{1:.2f} ({0:.2f} to {2:.2f})".format(*of_rank) for of_rank in record["speeds"]),
        ]
        for record in figures["slow_rank"]
    ]
    dense = figures["dense_part"]
    machine = figures["machine"]
    return {
        "slow rank": markdown_table(
            [
                "rank 1 has",
                "by FLOPs, ms",
                "learned, ms",
                "speedup",
                "rank 1's speed, measured",
                "measured imbalance",
                "speeds planned by",
            ],
            slow,
        ),
        "dense part": markdown_table(
            ["", "by FLOPs", "learned", "identical steps"],
            [
                [
                    "median error of predicted times",
                    *(f"{dense['error'][name]:.1%}" for name in ("flops", "learned")),
                    f"{dense['repeatability']:.1%}",
                ],
                [
                    "largest ÷ mean time − 1",
                    *(f"{dense['spread'][name]:.1%}" for name in ("flops", "learned")),
                    "–",
                ],
                ["step, ms", *(f"{dense['step_ms'][name]:.0f}" for name in ("flops", "learned")), "–"],
            ],
        ),
        "machine": f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}, gloo.",
    }


def _predicted_in_proportion(loads: np.ndarray, compute_seconds: list[list[float]]) -> np.ndarray:
    """float64 `[steps, ranks]`: loads in the unit of each rank that fits the steps before best."""
    seconds_per_load = np.array(compute_seconds) / loads
    units = []
    for step in range(STEPS_TO_FOLLOW, len(loads)):
        known = max(step - STEPS_IN_FLIGHT, 1)
        units.append(np.median(seconds_per_load[max(known - STEPS_OF_FIT, 0) : known], axis=0))
    return loads[STEPS_TO_FOLLOW:] * np.array(units)


def _median_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return round(float(np.median(np.abs(predicted / measured - 1))), 4)


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 1)
