"""Measures what a shuffler compiles before its first plan, where numba's cache is empty.

A folder with an older state of this repository is measured in turns with this one. Without it, the figures of
the older state stay as they are.
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

from benchmarks.harness import Record, machine, progress, read_result
from benchmarks.markdown import REPOSITORY, Cell, table

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


def measure(checkout: str | None = None) -> Record:
    """Returns a record for each case, of this state and of the older one, which take turns."""
    checkouts = {"after": REPOSITORY} | ({} if checkout is None else {"before": Path(checkout).resolve()})
    records: dict[str, list[Record]] = {name: [] for name in checkouts}
    for title, case in progress(CASES.items(), "cases"):
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
    return read_result("first_plan") | records | {"machine": {**machine(), "numba": numba.__version__}}


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


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    before = {record["case"]: record for record in figures["before"]}
    pairs = [{"before": before[record["case"]], "now": record} for record in figures["after"]]
    columns: dict[str, Cell] = {"settings": "{now[case]}"}
    columns |= {f"{when}: CPU s": f"{{{when}[cpu_seconds]:.1f}}" for when in ("before", "now")}
    columns |= {
        f"{when}: compilations": f"{{{when}[compilations]}} + {{{when}[compilations_in_the_plan]}}"
        for when in ("before", "now")
    }
    return {"first-plan seconds": table(pairs, columns)}
