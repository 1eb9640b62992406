"""Measures how few ranks compute each user's samples, from 8 ranks of 32 rows to 32 of 1,024.

python -m benchmarks.partition.groups_at_size [before]

`before` writes the figures beside those of the code of now: run it with an earlier version's `commons`. A
case that takes longer than 120 s is stopped.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import multiprocessing
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import markdown_table
from benchmarks.partition.user_streams import LENGTHS, ORDERS, USERS, draw
from commons.partition import imbalance, lower_bound, rebalance

RESULT = Path(__file__).parents[1] / "results" / "groups_at_size.json"
SIZES = ((8, 32), (64, 32), (8, 512), (512, 32), (32, 1024))
# What MLPerf Training's sampler for HSTU on Yambda-5B deals to 8 ranks: rows, samples of a user, events.
MLPERF = ((128, "38 each", "20 to 200"), (1024, "38 each", "20 to 200"), (1024, "386 each", "2048"))
TOLERANCE, LIMIT_SECONDS = 0.01, 120
NOW, BEFORE = "now", "before"
MANY_SAMPLES, DRAWS = 4096, 3

Case = tuple[int, int, str, str, str, bool]


def main() -> None:
    """Runs the benchmark, prints its table and writes the figures to `RESULT`."""
    version = {"nargs": "?", "choices": [NOW, BEFORE], "default": NOW}
    arguments = parse_arguments(__doc__, version=version)
    cases: list[Case] = [
        (*size, users, lengths, order, equal_size)
        for size, users, lengths, order, equal_size in product(SIZES, USERS, LENGTHS, ORDERS, (True, False))
    ]
    cases += [(8, *shape, "dealt", True) for shape in MLPERF]
    _warm_up()
    records = [_record(case) for case in tqdm(cases)]
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result |= {arguments.version: records, "machine": machine()}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, markdown in tables(result).items():
        print(f"{name}\n{markdown}\n")


def _warm_up() -> None:
    for equal_size in (True, False):
        measure((4, 8, "4 each", "lognormal", "dealt", equal_size), seed=0)


def _record(case: Case) -> dict[str, Any]:
    names = ("ranks", "rows", "users", "lengths", "order", "equal_rows")
    record: dict[str, Any] = dict(zip(names, case, strict=True))
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
    measured = [measure(case, seed) for seed in range(draws)]
    sender.send({name: float(np.mean([each[name] for each in measured])) for name in measured[0]})


def measure(case: Case, seed: int) -> dict[str, float]:
    """Returns the figures of one draw; `ms` of CPU time are those of the faster of two runs."""
    ranks, rows, users, lengths, order, equal_size = case
    stream = draw(ranks, rows, users, lengths, order, seed)
    milliseconds = []
    for _ in range(2):
        start = time.process_time()
        partition = rebalance(
            stream.workloads,
            stream.home,
            ranks,
            TOLERANCE,
            stream.sizes,
            groups=stream.user,
            equal_size=equal_size,
        )
        milliseconds.append((time.process_time() - start) * 1e3)
        if milliseconds[0] > 1000:
            break
    bound = lower_bound(stream.workloads, ranks, equal_size)
    load = imbalance(stream.workloads, partition) / bound
    return stream.figures(partition) | {"load_to_bound": load, "ms": min(milliseconds)}


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Returns Markdown by the name of a table."""
    of_case = {
        version: {_case(record): record for record in result[version]}
        for version in (BEFORE, NOW)
        if version in result
    }
    return {
        "at size": _table(of_case, lambda record: f"{record['ranks_per_user']:.2f}"),
        "planning": _table(of_case, lambda record: f"{record['ms']:,.0f}"),
        "moves": _table(of_case, lambda record: f"{record['moved']:.0%}"),
        "MLPerf": _mlperf_table(of_case),
    }


def _case(record: dict[str, Any]) -> Case:
    return tuple(record[name] for name in ("ranks", "rows", "users", "lengths", "order", "equal_rows"))


def _table(of_case: dict[str, dict[Case, dict[str, Any]]], show: Any) -> str:
    kinds = list(product(ORDERS, (True, False)))
    titles = [f"{order}, {'equal' if equal else 'unequal'} rows" for order, equal in kinds]
    rows = [
        [
            f"{ranks} × {of_rank:,}",
            users,
            lengths,
            *(
                " → ".join(
                    show(records[case]) if "ms" in records[case] else "stopped"
                    for records in of_case.values()
                    if (case := (ranks, of_rank, users, lengths, *kind)) in records
                )
                for kind in kinds
            ),
        ]
        for (ranks, of_rank), users, lengths in product(SIZES, USERS, LENGTHS)
    ]
    return markdown_table(["ranks × rows", "samples of a user", "lengths", *titles], rows)


def _mlperf_table(of_case: dict[str, dict[Case, dict[str, Any]]]) -> str:
    rows = []
    for of_rank, users, lengths in MLPERF:
        case = (8, of_rank, users, lengths, "dealt", True)
        found = [records[case] for records in of_case.values() if case in records]
        shown = [
            " → ".join(show(record) if "ms" in record else "stopped" for record in found)
            for show in (
                lambda record: f"{record['ranks_per_user']:.2f}",
                lambda record: f"{record['unique_ids']:.2f}",
                lambda record: f"{record['load_to_bound']:.3f}",
                lambda record: f"{record['ms']:.1f}",
            )
        ]
        rows.append([f"{of_rank:,}", users, *shown])
    titles = ["rows per rank", "samples of a user", "ranks per user", "unique ids ÷ dealt", "load ÷ bound"]
    return markdown_table([*titles, "ms of CPU"], rows)


if __name__ == "__main__":
    main()
