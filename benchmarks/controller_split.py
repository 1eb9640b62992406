"""Measures the time a controller needs to split a global batch, compared with copying the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.harness import Record, machine, quartiles, spread, times_in_turn
from benchmarks.shuffle import ROWS, FlopsShuffler, hstu_batch
from commons.datasets import HSTUBatch
from commons.features.controller import SplitOrder, split_balanced
from commons.sequence_batch.packed_rows import PackedRows, gather_rows, row_elements
from commons.sequence_batch.row_schema import RowSchema
from commons.sequence_batch.sample_rows import SampleRows

SAMPLES, CHUNKS, NUM_FEATURES = 512, 16, 5
BATCHES, ROUNDS = 10, 30
SELECTION = "row selection alone"
GIVEN, ASKED = "split_balanced, workloads given", "split_balanced, shuffler asked"


def measure() -> Record:
    """Returns the times of all calls, and how much longer splits take than copying the same rows."""
    rng = np.random.default_rng(0)
    shuffler = FlopsShuffler()
    times: dict[str, list[float]] = {SELECTION: [], GIVEN: [], ASKED: []}
    for _ in range(BATCHES):
        batch = _global_batch(rng)
        workloads = shuffler.get_workloads(batch).numpy()
        calls = {
            SELECTION: _row_selection(batch, split_balanced(batch, CHUNKS, shuffler)[1]),
            GIVEN: partial(split_balanced, batch, CHUNKS, workloads),
            ASKED: partial(split_balanced, batch, CHUNKS, shuffler),
        }
        for name, of_call in times_in_turn(calls, ROUNDS).items():
            times[name] += of_call
    beside = {name: np.subtract(times[name], times[SELECTION]) for name in (GIVEN, ASKED)}
    return {
        "samples": SAMPLES,
        "chunks": CHUNKS,
        "features": NUM_FEATURES,
        "calls": BATCHES * ROUNDS,
        "ms": {name: spread(of_arm) for name, of_arm in times.items()},
        "ms_beside_row_selection": {name: quartiles(of_arm) for name, of_arm in beside.items()},
        "machine": machine(),
    }


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
                gather_rows([packed], samples, of_chunk).unpack(num_rows), num_rows, len(samples)
            )
            for samples, of_chunk, num_rows in zip(order.partition, elements, order.chunk_rows, strict=True)
        ]

    return select
