"""Measures the compilation up to a shuffler's first plan when numba's cache is empty."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
from numba.core import event

from benchmarks.harness import Record, measure_cases, time_ms
from benchmarks.markdown import REPOSITORY, make_table
from commons.distributed.extension import Extension
from commons.distributed.placement import warm_up
from commons.distributed.settings import PARTITIONERS, ShufflerSettings
from commons.extensions.learned_costs import LearnedCosts  # noqa: F401  named in the cases
from commons.extensions.micro_batches import MicroBatches  # noqa: F401
from commons.extensions.pieces import Pieces  # noqa: F401
from commons.extensions.sample_groups import SampleGroups, rebalance_groups  # noqa: F401

# By title: settings of the shuffler, further arguments of its partitioner, and an extension.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "defaults": ({}, (), ""),
    "unequal rows": ({"equal_rows": False}, (), ""),
    "`max_tokens`": ({"max_tokens": 3000}, ("tokens", "max_tokens"), ""),
    "learned costs, ranks of different speeds": ({}, ("speeds",), "LearnedCosts()"),
    "groups": ({}, ("groups",), 'SampleGroups("user")'),
    "micro-batches": ({}, (), "MicroBatches(1000)"),
    "pieces": ({"equal_rows": False}, (), "Pieces()"),
    '`"refined"`': ({"partitioner": "refined"}, (), ""),
    '`"longest_processing_time"`': ({"partitioner": "longest_processing_time"}, (), ""),
    '`"karmarkar_karp"`': ({"partitioner": "karmarkar_karp"}, (), ""),
}


def measure() -> Record:
    """Returns a record for each case."""
    return {"after": measure_cases([{"case": case} for case in CASES], _run_first_plan, "cases")}


def _run_first_plan(case: str) -> Record:
    """Returns CPU seconds of a new process's start and first plan, and the numbers of compilations."""
    settings, arguments, extension = CASES[case]
    program = f"from {__name__} import *; plan({settings!r}, {arguments!r}, [{extension}])"
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        printed = subprocess.check_output([sys.executable, "-c", program], cwd=REPOSITORY, env=environment)
    return json.loads(printed)


def plan(fields: dict[str, Any], names: tuple[str, ...], extensions: list[Extension]) -> None:
    """Prints the figures that `_run_first_plan` returns, as JSON."""
    rng = np.random.default_rng(0)
    tokens = rng.lognormal(4, 1, 32).clip(1, 500).astype(np.int64)
    given = {"tokens": tokens, "max_tokens": 3000, "speeds": np.array([1.0, 0.9, 1.0, 0.8])}
    given |= {"groups": rng.integers(-1, 8, 32), "home": np.repeat(np.arange(4), 8), "sizes": tokens}
    settings = ShufflerSettings(**fields)
    names = (*names, *(name for name in ("home", "sizes") if settings.takes(name)))
    partitioner = rebalance_groups if "groups" in names else PARTITIONERS[settings.partitioner]
    place = partial(partitioner, equal_size=settings.equal_rows)
    seconds, compilations = [], []
    for call in (
        partial(warm_up, settings, extensions),
        partial(place, workloads=tokens**2, num_partitions=4, **{name: given[name] for name in names}),
    ):
        with event.install_recorder("numba:compile") as recorder:
            seconds.append(time_ms(call, time.process_time) / 1e3)
        compilations.append(sum(each.is_start for _, each in recorder.buffer))
    figures = {"cpu_seconds": round(sum(seconds), 1), "compilations": compilations[0]}
    print(json.dumps(figures | {"compilations_in_the_plan": compilations[1]}))


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    columns = {
        "settings": "{case}",
        "CPU s": "{cpu_seconds:.1f}",
        "functions compiled": "{compilations}",
        "of them in the first plan": "{compilations_in_the_plan}",
    }
    return {"first-plan seconds": make_table(figures["after"], columns)}
