"""Measures pieces of long samples: the balance of ranks, the bytes they fetch, and the time to plan."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from benchmarks.batches import make_history_batch
from benchmarks.harness import Record, average, measure_cases, time_in_turns
from benchmarks.markdown import join_rows
from benchmarks.partition.placements import (
    KUAIRAND,
    LOGNORMAL,
    LONG,
    PARETO_1_1,
    PARETO_1_6,
    ROWS_PER_RANK,
    Lengths,
    make_flops,
)
from commons.distributed.placement import make_plan, place
from commons.distributed.plan import Format, RowTable, ShufflePlan
from commons.distributed.settings import ShufflerSettings
from commons.extensions.pieces.cut_search import cut_and_place
from commons.extensions.pieces.cutting import COLUMN, Cutting
from commons.partition.imbalance import relative_to_mean
from commons.sequence_batch.fields import Schema
from hstu.batch_shuffler import HSTUBatchShuffler

RANKS = (8, 64, 1024)
# (lengths, width, rows per rank) for which whole samples cannot be balanced.
CASES = (
    *((LOGNORMAL, 128, ROWS_PER_RANK), (KUAIRAND, 128, ROWS_PER_RANK), (KUAIRAND, 1024, ROWS_PER_RANK)),
    *((PARETO_1_6, 128, ROWS_PER_RANK), (PARETO_1_6, 1024, ROWS_PER_RANK), (PARETO_1_1, 1024, ROWS_PER_RANK)),
    (LONG, 1024, 2),
)
NAMES = ("lengths", "hidden_size", "rows_per_rank")
BYTES_PER_NUMBER = 2  # of keys and values, in bfloat16
CALLS = 3  # timed calls per draw, alternating with and without pieces
PARTITIONING = ShufflerSettings(equal_rows=False)
_EXAMPLE = make_history_batch([1], seed=0)


def measure_pieces(lengths: dict[str, Lengths], draws: int) -> list[Record]:
    """Returns means over draws, one record per case and number of ranks."""

    def measure(lengths: str, hidden_size: int, rows_per_rank: int, ranks: int) -> Record:
        rng = np.random.default_rng([0, ranks])
        figures, times = [], []
        for _ in range(draws):
            samples, cutting = load_samples(known[lengths](rng, rows_per_rank * ranks), hidden_size, ranks)
            calls = [partial(place, samples, PARTITIONING), partial(place_pieces, samples, cutting)]
            whole, plan = (call() for call in calls)
            fetched = count_fetched_tokens(plan) * 2 * hidden_size * BYTES_PER_NUMBER / ranks
            figures.append(
                {
                    "imbalance_of_whole_samples": _find_imbalance(whole),
                    "imbalance": _find_imbalance(plan),
                    "samples_cut": int((np.bincount(plan.rows.sample_of) > 1).sum()),
                    "mb_fetched": fetched / 1e6,
                }
            )
            if not plan.rows.starts_sample.all():
                taken = time_in_turns(dict(enumerate(calls)), CALLS, clock=time.thread_time)
                times += list(zip(*taken.values(), strict=True))
        medians = np.median(times, 0).round(4).tolist() if times else (np.nan, np.nan)
        return average(figures, 4) | dict(zip(("ms_of_whole_samples", "ms"), medians, strict=True))

    known = lengths
    cases = [dict(zip(NAMES, case, strict=True)) | {"ranks": ranks} for case in CASES for ranks in RANKS]
    return measure_cases(cases, measure, "pieces")


def place_pieces(samples: RowTable, cutting: Cutting) -> ShufflePlan:
    """Returns the plan of a step whose samples may be cut."""
    return make_plan(*cut_and_place(samples, PARTITIONING, cutting))


def _find_imbalance(plan: ShufflePlan) -> float:
    return relative_to_mean(plan.loads)


def count_fetched_tokens(plan: ShufflePlan) -> int:
    """Returns the number of tokens whose keys and values all ranks fetch in one layer of causal attention.

    For each of its samples, a rank fetches the tokens on other ranks that precede its own last token.
    """
    rows = plan.rows
    if rows.starts_sample.all():
        return 0
    keys, index = np.unique(rows.sample_of * plan.num_ranks + plan.destination, return_inverse=True)
    last, own = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(last, index, rows.columns[COLUMN]["last_token"])
    np.add.at(own, index, rows.tokens)
    return int((last - own).sum())


def load_histories(lengths: np.ndarray, hidden_size: int, ranks: int) -> tuple[RowTable, Format]:
    """Returns the rows that ranks load, and their format. A history has a user and an action per item."""
    lengths = lengths.astype(np.int64)
    schema = Schema.of(_EXAMPLE.per_sample_fields())
    users, tokens = np.ones_like(lengths), 2 * lengths + 1
    keys = [key for field in schema.jagged_fields for key in field.keys]
    key_lengths = np.stack([users if key == "user" else lengths for key in keys], 1)
    per_rank = np.full(ranks, len(lengths) // ranks)
    workloads, num_bytes = make_flops(hidden_size).per_sample(tokens), schema.row_bytes(key_lengths)
    rows = RowTable(per_rank, per_rank, workloads, tokens, lengths, key_lengths, num_bytes)
    return rows, Format(schema, 1)


def load_samples(lengths: np.ndarray, hidden_size: int, ranks: int) -> tuple[RowTable, Cutting]:
    """Returns the rows of `load_histories`, and the rules for cutting them."""
    samples, row_format = load_histories(lengths, hidden_size, ranks)
    flops = make_flops(hidden_size)
    cutting = Cutting(
        HSTUBatchShuffler.cut_rules(_EXAMPLE),
        row_format.schema,
        row_format.count_names,
        lambda first, of: flops.prefix_work(first, of["tokens"], of["head_tokens"]).sum(1),
    )
    return samples, cutting


COLUMNS = {
    "whole": "{imbalance_of_whole_samples:.2f}",
    "in pieces": "{imbalance:.3f}",
    "samples cut": "{samples_cut:.1f}",
    "MB fetched": "{mb_fetched:.1f}",
    "ms, whole": "{ms_of_whole_samples:.2f}",
    "ms, in pieces": "{ms:.2f}",
}


def tabulate_pieces(pieces: list[Record]) -> str:
    """Returns a table of the figures at all numbers of ranks."""
    return join_rows(
        pieces, {"lengths": "{lengths}", "d": "{hidden_size}", "rows": "{rows_per_rank}"}, COLUMNS
    )
