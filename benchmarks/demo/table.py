"""The demo's figures as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.demo.training import AS_LOADED, DEFAULT, PIECES, SHOWN
from benchmarks.harness import Record
from benchmarks.markdown import Cell, markdown_table, show

TITLES = {"hstu": "HSTU", "sid_gr": "SID-GR"}
_INTERVAL = "({speedup_interval[0]:.2f}–{speedup_interval[1]:.2f})"
# Figures of an arm over all steps, by title.
ROWS: dict[str, Cell] = {
    "imbalance": "{imbalance_after:.3f}",
    "step": lambda arm: f"{arm['seconds_per_step'] * 1e3:.0f} ms",
    "speedup (95% of resampled runs)": "{speedup:.3f} " + _INTERVAL,
    "speedup predicted from the loads": "{speedup_predicted:.3f}",
    "bytes moved": "{share_of_bytes_moved:.0%}",
    "sent per rank and step": lambda arm: f"{arm['bytes_sent_per_step'] / 1e3:.0f} kB",
    "samples cut per step": "{samples_cut_per_step:.2f}",
    "keys and values fetched per rank and step": lambda arm: f"{arm['bytes_fetched_per_step'] / 1e6:.1f} MB",
    "largest relative difference of a step's loss": "{max_relative_loss_difference:.0e}",
}


def tables(summaries: Mapping[str, Record]) -> dict[str, str]:
    """Returns the Markdown for each marker: a table for each model, and the README's figures.

    Args:
        summaries: contents of `summary.json` for each model in `TITLES`.
    """
    return {
        **{f"demo {model}": tabulate_model(summary) for model, summary in summaries.items()},
        "demo speedup": _format_speedups(summaries, DEFAULT),
        "demo pieces": _format_speedups(summaries, PIECES),
        "demo replay": _format_replay(summaries["hstu"]["replay"]),
        "demo prediction": "; ".join(_format_prediction(*each) for each in summaries.items()),
        "demo machine": _format_machine(summaries),
        "demo duration": format_duration(
            len(SHOWN) / len(summaries["hstu"]["arms"]) * sum(summaries["hstu"]["seconds"].values())
        ),
    }


def tabulate_model(summary: Record) -> str:
    """Returns a model's table, with a row for each figure and a column for each arm."""
    arms, difference = summary["balanced"], "max_relative_loss_difference"
    figures = [arm["untrimmed"] | {difference: arm[difference]} for arm in arms.values()]
    as_loaded = {
        "imbalance": f"{figures[0]['imbalance_before']:.3f}",
        "step": f"{figures[0]['seconds_per_step_as_loaded'] * 1e3:.0f} ms",
    }
    rows = [
        [name, as_loaded.get(name, ""), *(show(each, cell) for each in figures)]
        for name, cell in ROWS.items()
    ]
    over_pieces = (arm.get("over_pieces_by_flops") for arm in arms.values())
    speedups = [("{speedup:.3f} " + _INTERVAL).format(**each) if each else "" for each in over_pieces]
    rows.append(["speedup over pieces by FLOPs", "", *speedups])
    replays = [summary["replay"][name] for name in (AS_LOADED, *arms)]
    ends, ranks = list(map(_sum_slowest, replays)), len(replays[0][0])
    waiting = [1 - sum(map(sum, steps)) / (end * ranks) for steps, end in zip(replays, ends, strict=True)]
    rows += [
        [f"{ranks} ranks replayed", *(f"{end:.1f} s" for end in ends)],
        ["of it waiting", *(f"{share:.0%}" for share in waiting)],
        ["speedup", "", *(f"{ends[0] / end:.2f}" for end in ends[1:])],
    ]
    return markdown_table(["", AS_LOADED, *arms], rows)


def format_duration(seconds: float) -> str:
    """Returns a duration as text, rounded up to half minutes."""
    halves = math.ceil(seconds / 30)
    return "about a minute" if halves <= 2 else f"about {halves / 2:g} minutes"


def _format_speedups(summaries: Mapping[str, Record], arm: str) -> str:
    """Returns each model's speedup, measured on real ranks."""
    of_models = (
        f"{TITLES[model]} {{speedup:.2f}}× {_INTERVAL}".format(**summary["balanced"][arm]["untrimmed"])
        for model, summary in summaries.items()
    )
    return ", ".join(of_models)


def _format_replay(replay: Record) -> str:
    """Returns the speedups of replayed ranks with the default, and with pieces."""
    end = _sum_slowest(replay[AS_LOADED])
    default, pieces = (end / _sum_slowest(replay[arm]) for arm in (DEFAULT, PIECES))
    return f"{default:.2f}× with the default, and {pieces:.2f}× with pieces"


def _format_prediction(model: str, summary: Record) -> str:
    text = f"{TITLES[model]} {{speedup_predicted:.2f}} × and {{speedup:.2f}} ×"
    return text.format(**summary["balanced"][DEFAULT]["untrimmed"])


def _format_machine(summaries: Mapping[str, Record]) -> str:
    machine = summaries["hstu"]["machine"]
    torch = machine["torch"].partition("+")[0]
    return f"{machine['cores']} CPU cores ({machine['cpu']}, torch {torch}, gloo)"


def _sum_slowest(steps: list[list[float]]) -> float:
    """Returns the seconds of all steps. Each step lasts as long as its slowest rank."""
    return sum(map(max, steps))
