"""Measures the time a controller needs to split a global batch, compared with copying the rows.

python -m benchmarks.controller_split
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine, spread
from benchmarks.shuffle.features import ROWS, FlopsShuffler, hstu_batch
from commons.datasets import HSTUBatch
from commons.distributed import SplitOrder, split_balanced
from commons.partition import imbalance, lower_bound
from commons.sequence_batch.packed_rows import PackedRows, gather_rows, row_elements
from commons.sequence_batch.row_schema import RowSchema
from commons.sequence_batch.sample_rows import SampleRows

RESULT = Path(__file__).parent / "results" / "controller_split.json"
SAMPLES, CHUNKS, NUM_FEATURES = 512, 16, 5
BATCHES, ROUNDS, WARM_UP_ROUNDS = 10, 30, 1
TARGET_MS = 1.0
SELECTION = "row selection alone"
GIVEN, ASKED = "split_balanced, workloads given", "split_balanced, shuffler asked"


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT`."""
    parse_arguments(__doc__)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    shuffler = FlopsShuffler()
    batches = [_global_batch(rng) for _ in range(BATCHES)]
    workloads = [shuffler.get_workloads(batch).sum(1).numpy() for batch in batches]
    orders = [split_balanced(batch, CHUNKS, shuffler)[1] for batch in batches]
    milliseconds: dict[str, list[float]] = {SELECTION: [], GIVEN: [], ASKED: []}
    for round_ in range(WARM_UP_ROUNDS + ROUNDS):
        for number, (batch, of_batch, order) in enumerate(zip(batches, workloads, orders, strict=True)):
            arms: dict[str, Callable[[], Any]] = {
                SELECTION: _row_selection(batch, order),
                GIVEN: partial(split_balanced, batch, CHUNKS, of_batch),
                ASKED: partial(split_balanced, batch, CHUNKS, shuffler),
            }
            names = list(arms)
            first = (round_ + number) % len(names)  # so no arm always finds the batch in the cache
            for name in names[first:] + names[:first]:
                taken = _milliseconds(arms[name])
                if round_ >= WARM_UP_ROUNDS:
                    milliseconds[name].append(taken)
    figures = _times(milliseconds) | _balance(workloads, orders) | {"machine": machine()}
    print(json.dumps(figures, indent=1))
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _global_batch(rng: np.random.Generator) -> HSTUBatch:
    """Returns `SAMPLES` rows, merged from batches of the shuffle benchmark."""
    parts = [hstu_batch(rng, NUM_FEATURES) for _ in range(SAMPLES // ROWS)]
    fields = [part.per_sample_fields() for part in parts]
    num_elements = [sum(of_part[name].values().numel() for of_part in fields) for name in fields[0]]
    rows = SampleRows()
    merged = gather_rows([rows.packed(part) for part in parts], np.arange(SAMPLES), num_elements)
    return rows.with_rows(parts[0], merged.unpack(), SAMPLES, SAMPLES)


def _row_selection(batch: HSTUBatch, order: SplitOrder) -> Callable[[], list[HSTUBatch]]:
    """Returns a function that only copies the same rows into the same chunks."""

    def pack() -> PackedRows:
        fields = batch.per_sample_fields()
        return PackedRows.pack(fields, RowSchema.of(fields), SAMPLES)

    packed = pack()
    of_rows = row_elements(packed.lengths, packed.schema).numpy()
    elements = [of_rows[samples].sum(0).tolist() for samples in order.partition]

    def select() -> list[HSTUBatch]:
        packed = pack()
        return [
            batch.with_fields(
                gather_rows([packed], samples, of_chunk).unpack(num_rows),
                num_rows,
                len(samples),
            )
            for samples, of_chunk, num_rows in zip(order.partition, elements, order.chunk_rows, strict=True)
        ]

    return select


def _milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def _times(milliseconds: dict[str, list[float]]) -> dict[str, Any]:
    selection = np.array(milliseconds[SELECTION])
    beside = {name: np.array(milliseconds[name]) - selection for name in (GIVEN, ASKED)}
    quartiles = {name: np.percentile(of_arm, [25, 50, 75]).tolist() for name, of_arm in beside.items()}
    return {
        "samples": SAMPLES,
        "chunks": CHUNKS,
        "features": NUM_FEATURES,
        "calls": len(selection),
        "ms": {name: spread(of_arm) for name, of_arm in milliseconds.items()},
        "ms_beside_row_selection": {
            name: {"median": round(median, 3), "middle_half": [round(low, 3), round(high, 3)]}
            for name, (low, median, high) in quartiles.items()
        },
        "target_ms_beside_row_selection": TARGET_MS,
        "reached": quartiles[GIVEN][1] < TARGET_MS,
    }


def _balance(workloads: list[np.ndarray], orders: list[SplitOrder]) -> dict[str, Any]:
    """Returns the chunks' largest load ÷ mean load over the batches, and its lower bound."""
    in_order = np.array_split(np.arange(SAMPLES), CHUNKS)
    partitions = [order.partition for order in orders]
    balanced = [imbalance(*of_batch) for of_batch in zip(workloads, partitions, strict=True)]
    return {
        "imbalance": {
            "in order": spread([imbalance(of_batch, in_order) for of_batch in workloads]),
            "balanced": spread(balanced, digits=6),
            "lower bound": spread([lower_bound(of_batch, CHUNKS) for of_batch in workloads], digits=6),
        }
    }


if __name__ == "__main__":
    main()
