"""Measures what a shuffler compiles before its first plan, where numba's cache is empty.

    python -m benchmarks.first_plan [CHECKOUT]

CHECKOUT is a folder with an older state of this repository, measured in turns with this one. Without it, the
figures of the older state stay as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numba
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import markdown_table, publish

BENCHMARKS = Path(__file__).parent
RESULT, README = BENCHMARKS / "results" / "first_plan.json", BENCHMARKS / "README.md"

# By title: settings of the shuffler, and what its partitioner gets besides.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, ()),
    "unequal rows": ({"equal_rows": False}, ()),
    "`max_tokens`": ({"max_tokens": 3000}, ("tokens", "max_tokens")),
    "learned costs, ranks of different speeds": ({}, ("speeds",)),
    "groups": ({"group_feature": "user"}, ("groups",)),
    "micro-batches": ({"max_tokens_per_micro_batch": 1000}, ()),
    "split": ({"equal_rows": False, "split": True}, ()),
    '`"refined"`': ({"partitioner": "refined"}, ()),
    '`"longest_processing_time"`': ({"partitioner": "longest_processing_time"}, ()),
    '`"karmarkar_karp"`': ({"partitioner": "karmarkar_karp"}, ()),
}

# Runs in a new process, in either checkout, so it uses only what both have.
PROGRAM = """
import json, sys, time
import numpy as np
from numba.core import event
from commons.distributed.placement import warm_up
from commons.distributed.shuffler_settings import PARTITIONERS, ShufflerSettings

fields, names = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
tokens = rng.lognormal(4, 1, 32).clip(1, 500).astype(np.int64)
given = {
    "tokens": tokens, "max_tokens": 3000, "speeds": np.array([1.0, 0.9, 1.0, 0.8]),
    "groups": rng.integers(-1, 8, 32), "home": np.repeat(np.arange(4), 8), "sizes": tokens,
}
settings = ShufflerSettings(**fields)
arguments = {name: given[name] for name in [*names, *(n for n in ("home", "sizes") if settings.takes(n))]}
seconds, compilations = [], []
for call in (
    lambda: warm_up(settings),
    lambda: PARTITIONERS[settings.partitioner](
        workloads=tokens**2, num_partitions=4, equal_size=settings.equal_rows, **arguments
    ),
):
    start = time.process_time()
    with event.install_recorder("numba:compile") as recorder:
        call()
    seconds.append(time.process_time() - start)
    compilations.append(sum(each.is_start for _, each in recorder.buffer))
print(json.dumps([*seconds, *compilations]))
"""


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT` and `README`."""
    settings = {"type": Path, "nargs": "?", "help": "a folder with an older state of this repository"}
    older: Path | None = parse_arguments(__doc__, checkout=settings).checkout
    checkouts = {"after": BENCHMARKS.parent} | ({} if older is None else {"before": older.resolve()})
    figures = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    figures |= _measure(checkouts) | {"machine": {**machine(), "numba": numba.__version__}}
    publish(figures, {"seconds": make_table(figures)}, RESULT, README, "first-plan")


def _measure(checkouts: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Returns a record for each case of every checkout, which take turns."""
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for title, case in tqdm(CASES.items(), desc="cases"):
        for name, folder in checkouts.items():
            start, plan, compilations, in_the_plan = _first_plan(folder, *case)
            records[name].append(
                {
                    "case": title,
                    "cpu_seconds": round(start + plan, 1),
                    "compilations": int(compilations),
                    "compilations_in_the_plan": int(in_the_plan),
                }
            )
    return records


def _first_plan(folder: Path, settings: dict[str, Any], arguments: tuple[str, ...]) -> list[float]:
    """CPU seconds of the start and of the first plan, and compilations of each, in a new process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(folder)}
        output = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps([settings, arguments])],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        ).stdout
    return json.loads(output)


def make_table(figures: dict[str, Any]) -> str:
    """Returns the figures as Markdown."""
    before = {record["case"]: record for record in figures["before"]}
    rows = []
    for after in figures["after"]:
        of_both = [before[after["case"]], after]
        seconds = [f"{record['cpu_seconds']:.1f}" for record in of_both]
        compilations = [
            f"{record['compilations']} + {record['compilations_in_the_plan']}" for record in of_both
        ]
        rows.append([after["case"], *seconds, *compilations])
    titles = ["settings", "before: CPU s", "now: CPU s", "before: compilations", "now: compilations"]
    return markdown_table(titles, rows)


if __name__ == "__main__":
    main()
