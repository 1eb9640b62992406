"""Measures how few ranks compute each user's samples, from 8 ranks of 32 rows to 32 of 1,024.

`python -m benchmarks groups before` writes the figures beside those of the code of now: run it with an
earlier version's `commons`. A case that takes longer than 120 s is stopped.
"""

from __future__ import annotations

import multiprocessing
import time
from itertools import product
from typing import Any

from benchmarks.harness import Record, machine, means, progress, read_result
from benchmarks.markdown import Cell, pivot, table
from benchmarks.partition.user_streams import LENGTHS, ORDERS, USERS, draw
from commons.partition import imbalance, lower_bound, rebalance

SIZES = ((8, 32), (64, 32), (8, 512), (512, 32), (32, 1024))
# What MLPerf Training's sampler for HSTU on Yambda-5B deals to 8 ranks: rows, samples of a user, events.
MLPERF = ((128, "38 each", "20 to 200"), (1024, "38 each", "20 to 200"), (1024, "386 each", "2048"))
TOLERANCE, LIMIT_SECONDS = 0.01, 120
BEFORE, NOW = VERSIONS = ("before", "now")
MANY_SAMPLES, DRAWS = 4096, 3

Case = tuple[int, int, str, str, str, bool]
NAMES = ("ranks", "rows", "users", "lengths", "order", "equal_rows")


def measure(version: str = NOW) -> Record:
    """Returns a record for each case; those of the other version stay as they are."""
    if version not in VERSIONS:
        raise ValueError(f"expected {BEFORE} or {NOW}, got {version}")
    cases: list[Case] = [
        (*size, *kind) for size, *kind in product(SIZES, USERS, LENGTHS, ORDERS, (True, False))
    ]
    cases += [(8, *shape, "dealt", True) for shape in MLPERF]
    _warm_up()
    records = [_record(case) for case in progress(cases, "cases")]
    return read_result("groups_at_size") | {version: records, "machine": machine()}


def _warm_up() -> None:
    for equal_size in (True, False):
        figures_of((4, 8, "4 each", "lognormal", "dealt", equal_size), seed=0)


def _record(case: Case) -> Record:
    record: Record = dict(zip(NAMES, case, strict=True))
    draws = DRAWS if case[0] * case[1] < MANY_SAMPLES else 1
    # A process of its own, because compiled code cannot be interrupted.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, case, draws))
    process.start()
    if receiver.poll(LIMIT_SECONDS):
        record |= receiver.recv()
    process.kill()
    process.join()
    return record


def _send(sender: Any, case: Case, draws: int) -> None:
    sender.send(means([figures_of(case, seed) for seed in range(draws)], digits=16))


def figures_of(case: Case, seed: int) -> dict[str, float]:
    """Returns the figures of one draw; `ms` of CPU time are those of the faster of two runs."""
    ranks, rows, users, lengths, order, equal_size = case
    stream = draw(ranks, rows, users, lengths, order, seed)
    arguments = (stream.workloads, stream.home, ranks, TOLERANCE, stream.sizes)
    times = []
    for _ in range(2):
        start = time.process_time()
        partition = rebalance(*arguments, groups=stream.user, equal_size=equal_size)
        times.append((time.process_time() - start) * 1e3)
        if times[0] > 1000:
            break
    bound = lower_bound(stream.workloads, ranks, equal_size)
    load = imbalance(stream.workloads, partition) / bound
    return stream.figures(partition) | {"load_to_bound": load, "ms": min(times)}


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker; cells have the figures of both versions."""
    versions = [{_case(each): each for each in figures[name]} for name in VERSIONS if name in figures]
    records = [dict(zip(NAMES, case, strict=True)) for case in versions[-1]]

    def cell(show: str) -> Cell:
        def both(record: Record) -> str:
            found = [of_version[_case(record)] for of_version in versions if _case(record) in of_version]
            return " → ".join(show.format(**each) if "ms" in each else "stopped" for each in found)

        return both

    at_size = [record for record in records if record["users"] in USERS]
    rows = {"ranks × rows": "{ranks} × {rows:,}", "samples of a user": "{users}", "lengths": "{lengths}"}
    shapes: dict[str, Cell] = {"rows per rank": "{rows:,}", "samples of a user": "{users}"}
    of_shapes = {
        "ranks per user": cell("{ranks_per_user:.2f}"),
        "unique ids ÷ dealt": cell("{unique_ids:.2f}"),
        "load ÷ bound": cell("{load_to_bound:.3f}"),
        "ms of CPU": cell("{ms:.1f}"),
    }

    def column(record: Record) -> str:
        return f"{record['order']}, {'equal' if record['equal_rows'] else 'unequal'} rows"

    return {
        "groups at size": pivot(at_size, rows, column, cell("{ranks_per_user:.2f}")),
        "groups planning": pivot(at_size, rows, column, cell("{ms:,.0f}")),
        "groups moves": pivot(at_size, rows, column, cell("{moved:.0%}")),
        "groups MLPerf": table([r for r in records if r["users"] not in USERS], shapes | of_shapes),
    }


def _case(record: Record) -> Case:
    return tuple(record[name] for name in NAMES)
