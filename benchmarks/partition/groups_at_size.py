"""Measures ranks per user and the time of planning with groups, up to 512 ranks or 1,024 rows per rank."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.harness import Record, average, list_cases, machine, measure_cases, time_call
from benchmarks.markdown import make_table, pivot
from benchmarks.partition.user_streams import LENGTHS, ORDERS, USERS, draw
from commons.extensions.sample_groups import rebalance_groups
from commons.partition import imbalance, lower_bound

SIZES = ((8, 32), (64, 32), (8, 512), (512, 32), (32, 1024))
# Streams of MLPerf Training's sampler for HSTU on Yambda-5B, on 8 ranks: (rows, samples per user, events).
MLPERF = ((128, "38 each", "20 to 200"), (1024, "38 each", "20 to 200"), (1024, "386 each", "2048"))
TOLERANCE = 0.01
MANY_SAMPLES, DRAWS = 4096, 3


def measure() -> Record:
    """Returns a record for each case."""
    cases = [
        {"ranks": ranks, "rows": rows, **case}
        for ranks, rows in SIZES
        for case in list_cases(users=USERS, lengths=LENGTHS, order=ORDERS, equal_rows=(True, False))
    ]
    cases += [
        {"ranks": 8, "rows": rows, "users": users, "lengths": lengths, "order": "dealt", "equal_rows": True}
        for rows, users, lengths in MLPERF
    ]
    for equal_rows in (True, False):  # compiles
        _measure(4, 8, "4 each", "lognormal", "dealt", equal_rows)
    return {"now": measure_cases(cases, _measure, "cases"), "machine": machine()}


def _measure(ranks: int, rows: int, users: str, lengths: str, order: str, equal_rows: bool) -> Record:
    """Returns means over draws. `ms` is the CPU time of the faster of two calls."""
    figures = []
    for seed in range(DRAWS if ranks * rows < MANY_SAMPLES else 1):
        stream = draw(ranks, rows, users, lengths, order, seed)
        homes = stream.home, ranks, TOLERANCE, stream.sizes
        place = partial(rebalance_groups, stream.workloads, *homes, groups=stream.user)
        calls = [time_call(partial(place, equal_size=equal_rows), time.process_time) for _ in range(2)]
        partition, ms = calls[0][0], min(taken for _, taken in calls)
        load = imbalance(stream.workloads, partition) / lower_bound(stream.workloads, ranks, equal_rows)
        figures.append(stream.figures(partition) | {"load_to_bound": load, "ms": ms})
    return average(figures, digits=16)


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker: the worst streams at each size, and MLPerf's streams."""
    worst: dict[tuple[str, str], Record] = {}
    for record in figures["now"]:
        size = f"{record['ranks']} × {record['rows']:,}"
        so_far = worst.setdefault((size, record["users"]), {"ranks_per_user": 0.0, "ms": 0.0})
        so_far |= {name: max(so_far[name], record[name]) for name in so_far}
    at_size = [
        {"size": size, "users": users} | record for (size, users), record in worst.items() if users in USERS
    ]
    columns = {
        "rows per rank": "{rows:,}",
        "samples of a user": "{users}",
        "ranks per user": "{ranks_per_user:.2f}",
        "unique ids ÷ dealt": "{unique_ids:.2f}",
        "load ÷ bound": "{load_to_bound:.3f}",
        "ms of CPU": "{ms:.1f}",
    }
    mlperf = [record for record in figures["now"] if record["users"] not in USERS]
    return {
        "groups at size": pivot(
            at_size, {"ranks × rows": "{size}"}, "{users}", "{ranks_per_user:.2f} / {ms:.0f} ms"
        ),
        "groups MLPerf": make_table(mlperf, columns),
    }
