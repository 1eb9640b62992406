"""Computes the gains of balancing on public data sets, from loads instead of times.

MovieLens 100K's lengths are its own. The lengths of other data sets are drawn as published.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from benchmarks.harness import Record, average, show_progress
from benchmarks.markdown import Cell, make_table
from benchmarks.partition.placements import (
    AS_LOADED,
    ML_100K,
    ML_100K_NEWEST,
    PLACEMENTS,
    ZIPF,
    Lengths,
    draw_batches,
    list_lengths,
)
from commons.advisor.__main__ import main as advise
from commons.advisor.public_data import PUBLIC_DATA, PublishedLengths
from commons.distributed import ShufflerSettings
from commons.partition import imbalance, lower_bound

RANKS, DRAWS = (8, 64), 30
# (data set, number of newest events that a trainer keeps, width of the layer). None keeps all events.
CASES = (
    *(("ml-20m", 200, 128), ("yambda-5b", 4086, 1024), ("yambda-5b", None, 1024)),
    *(("kuairand-1k", 4096, 1024), ("kuairand-27k", 8000, 1024), ("ml-32m", None, 1024)),
)
DEFAULT = ShufflerSettings().partitioner
PLACED = {AS_LOADED: AS_LOADED, "Karmarkar–Karp": "karmarkar_karp", "balanced (default)": DEFAULT}
GAINS: dict[str, Cell] = {title: f"{{{name}:.2f}}" for title, name in PLACED.items()}
GAINS["speedup, at most"] = lambda record: f"{record[AS_LOADED] / record[DEFAULT]:.2f}×"
# Whose gains the README shows.
SHOWN = ("MovieLens 20M, newest 200", "Yambda-5B, newest 4,086", "Yambda-5B, uncapped")
# Ranks and width in NVIDIA recsys-examples' benchmark of its shuffler, whose lengths are zipf's.
NVIDIA_RANKS, NVIDIA_WIDTH = 16, 1024
# The model of that benchmark, as arguments of the advisor.
MODEL = ("--model", "hstu", "--hidden-size", "1024", "--num-layers", "8", "--num-heads", "4")


def measure(movielens: Path | None = None) -> Record:
    """Returns records of placements, and of the advisor's answers."""
    lengths = list_lengths(movielens)
    titles = {"MovieLens 100K, uncapped": ML_100K, "MovieLens 100K, newest 200": ML_100K_NEWEST}
    cases = [(title, 128, lengths[name]) for title, name in titles.items() if name in lengths]
    for name, cap, width in CASES:
        title = f"{PUBLIC_DATA[name].title}, " + ("uncapped" if cap is None else f"newest {cap:,}")
        cases.append((title, width, _capped(PUBLIC_DATA[name], cap)))
    return {
        "placements": [
            {"lengths": title, "hidden_size": width, "ranks": ranks, **_place(drawn, width, ranks)}
            for title, width, drawn in show_progress(cases, "placements")
            for ranks in RANKS
        ],
        "nvidia": _place(lengths[ZIPF], NVIDIA_WIDTH, NVIDIA_RANKS),
        "advice": [_ask(name) for name in show_progress(list(PUBLIC_DATA), "advice")],
    }


def _capped(published: PublishedLengths, cap: int | None) -> Lengths:
    return lambda rng, count: published.draw(rng, count).clip(max=cap)


def _place(lengths: Lengths, hidden_size: int, ranks: int) -> dict[str, float]:
    """Returns the imbalance of each placement, and a bound that no placement of whole samples beats."""
    batches = draw_batches(lengths, hidden_size, ranks, DRAWS)
    found = [
        {name: imbalance(batch.workloads, PLACEMENTS[name](batch)) for name in PLACED.values()}
        | {"bound": lower_bound(batch.workloads, ranks, equal_size=True)}
        for batch in batches
    ]
    return average(found)


def _ask(name: str) -> Record:
    """Returns the advisor's figures for a data set, with lengths capped as trainers cap them."""
    cap = PUBLIC_DATA[name].cap
    capped = () if cap is None else ("--max-length", str(cap))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = advise(["--lengths-of", name, *capped, *MODEL, "--ranks", ",".join(map(str, RANKS)), "--json"])
    if code:
        raise RuntimeError(f"the advisor failed on {name}")
    cases = json.loads(printed.getvalue())["cases"]
    answers = []
    for case in cases:
        strategies = {strategy["name"]: strategy for strategy in case["strategies"]}
        as_loaded, speedup = strategies["as_loaded"]["imbalance"], strategies[DEFAULT]["speedup"]
        answers.append(
            {"ranks": case["ranks"], "as_loaded": round(as_loaded, 4), "speedup": round(speedup, 4)}
        )
    return {"name": name, "cap": cap, "answers": answers}


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker. The README's figures are for the largest number of ranks."""
    largest = [record for record in figures["placements"] if record["ranks"] == RANKS[-1]]
    shown = [record for record in largest if record["lengths"] in SHOWN]
    return {
        "readme gains": "; ".join(map(_show_gain, shown)),
        "readme nvidia": make_table([figures["nvidia"]], GAINS),
        "advisor public data": make_table(
            figures["advice"],
            {
                "`--lengths-of`": lambda record: f"`{record['name']}`",
                "mean (median)": _show_published,
                "`--max-length`": lambda record: "–" if record["cap"] is None else f"{record['cap']:,}",
                "as loaded": lambda record: _join(record["answers"], "{as_loaded:.2f}"),
                "speedup": lambda record: _join(record["answers"], "{speedup:.2f}"),
            },
        ),
    }


def _show_gain(record: Record) -> str:
    return f"{record['lengths']} {record[AS_LOADED] / record[DEFAULT]:.2f}×"


def _show_published(record: Record) -> str:
    published = PUBLIC_DATA[record["name"]]
    median = "" if published.median is None else f" ({published.median:,.0f})"
    return f"{published.mean:,.0f}{median}"


def _join(records: list[Record], cell: str) -> str:
    return " / ".join(cell.format(**record) for record in records)
