"""Pieces of long samples: how well ranks balance, what they fetch, and how long the placement takes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from benchmarks.partition.lengths import (
    LOGNORMAL,
    LONG,
    PARETO_1_1,
    PARETO_1_6,
    Lengths,
    long_tailed_lengths,
)
from benchmarks.partition.placements import ROWS_PER_RANK, hstu_flops
from commons.datasets import HSTUBatch
from commons.distributed.cutting import Cutting
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.placement import place
from commons.distributed.shuffle_plan import ShufflePlan
from commons.distributed.shuffler_settings import ShufflerSettings
from commons.partition.balance import relative_to_mean
from commons.sequence_batch.row_schema import RowSchema

RANKS, HIDDEN_SIZES = (2, 8, 64, 1024), (128, 1024)
# Lengths, hidden size and rows per rank, where histories are long.
LONG_CASES = (
    (LOGNORMAL, 256, ROWS_PER_RANK),
    (PARETO_1_6, 128, ROWS_PER_RANK),
    (PARETO_1_6, 1024, ROWS_PER_RANK),
    (PARETO_1_1, 1024, ROWS_PER_RANK),
    (LONG, 1024, 2),
)
BYTES_PER_NUMBER = 2  # of keys and values, in bfloat16
CALLS = 3  # of a draw, with and without pieces in turns
SETTINGS = ShufflerSettings(equal_rows=False)


def measure_pieces(lengths: dict[str, Lengths], draws: int) -> list[dict[str, Any]]:
    """Returns a record for each lengths, hidden size, and ranks."""
    cases = [(name, size, ROWS_PER_RANK) for name in lengths for size in HIDDEN_SIZES]
    known = {**lengths, **long_tailed_lengths()}
    each = [(*case, ranks) for case in (*cases, *LONG_CASES) for ranks in RANKS]
    return [_measure(known[case[0]], *case, draws) for case in tqdm(each, desc="pieces")]


def _measure(
    lengths: Lengths, name: str, hidden_size: int, rows: int, ranks: int, draws: int
) -> dict[str, Any]:
    rng = np.random.default_rng([0, ranks])
    figures, milliseconds = [], []
    for _ in range(draws):
        samples, cutting = _loaded(lengths(rng, rows * ranks), hidden_size, ranks)
        whole, plan = place(samples, SETTINGS), place(samples, SETTINGS, cutting=cutting)
        figures.append(
            {
                "imbalance_of_whole_samples": _imbalance(whole),
                "imbalance": _imbalance(plan),
                **_pieces(plan),
                "mb_fetched": tokens_fetched(plan) * 2 * hidden_size * BYTES_PER_NUMBER / ranks / 1e6,
            }
        )
        calls = [_milliseconds(samples, each) for _ in range(CALLS) for each in (None, cutting)]
        if plan.pieces is not None:
            milliseconds.append(calls)
    means = {key: round(float(np.mean([each[key] for each in figures])), 4) for key in figures[0]}
    of_draws_with_pieces = np.reshape(milliseconds, (-1, 2))
    return {
        "lengths": name,
        "hidden_size": hidden_size,
        "rows_per_rank": rows,
        "ranks": ranks,
        "draws": draws,
        **means,
        "largest_imbalance": round(max(each["imbalance"] for each in figures), 4),
        **_medians(of_draws_with_pieces),
    }


def _medians(milliseconds: np.ndarray) -> dict[str, float | None]:
    """Returns the medians of calls `[calls, 2]`, of whole samples and with pieces; None without calls."""
    medians = np.median(milliseconds, 0).round(4).tolist() if len(milliseconds) else [None, None]
    return dict(zip(("ms_of_whole_samples", "ms"), medians, strict=True))


def _imbalance(plan: ShufflePlan) -> float:
    return relative_to_mean(np.bincount(plan.destination, plan.workloads, minlength=plan.num_ranks))


def _pieces(plan: ShufflePlan) -> dict[str, int]:
    per_sample = np.bincount(plan.sample_of)
    of_cut = per_sample[per_sample > 1]
    return {"samples_cut": len(of_cut), "pieces": int(of_cut.sum())}


def tokens_fetched(plan: ShufflePlan) -> int:
    """Returns the tokens whose keys and values ranks fetch in one layer with causal attention, added up.

    A rank fetches those tokens of a sample that are on other ranks, before the last of its own.
    """
    if plan.pieces is None:
        return 0
    sample_of = plan.sample_of
    keys, index = np.unique(sample_of * plan.num_ranks + plan.destination, return_inverse=True)
    last, own = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    np.maximum.at(last, index, plan.pieces["last_token"])
    np.add.at(own, index, plan.tokens)
    return int((last - own).sum())


def _milliseconds(samples: LoadedSamples, cutting: Cutting | None) -> float:
    start = time.thread_time()
    place(samples, SETTINGS, cutting=cutting)
    return (time.thread_time() - start) * 1e3


def _loaded(lengths: np.ndarray, hidden_size: int, ranks: int) -> tuple[LoadedSamples, Cutting]:
    """Returns histories of these items, each with a user and an action per item, as ranks loaded them."""
    lengths = lengths.astype(np.int64)
    batch = _batch()
    schema, names = RowSchema.of(batch.per_sample_fields()), tuple(batch.row_counts())
    users, tokens = np.ones_like(lengths), 2 * lengths + 1
    counts = np.stack([users if name == "features.user" else lengths for name in names], 1)
    elements = np.stack(
        [tokens if field.name == "features" else lengths for field in schema.jagged_fields], 1
    )
    flops = hstu_flops(hidden_size)
    cutting = Cutting(
        batch.cut_rules(),
        schema,
        names,
        lambda first, of: flops.prefix_work(first, of["tokens"], of["head_tokens"]).sum(1),
    )
    per_rank = np.full(ranks, len(lengths) // ranks)
    workloads, num_bytes = flops.per_sample(tokens), schema.row_bytes(elements)
    return LoadedSamples(per_rank, per_rank, workloads, tokens, lengths, elements, num_bytes, counts), cutting


def _batch() -> HSTUBatch:
    one = torch.ones(3, dtype=torch.int64)
    return HSTUBatch(
        features=KeyedJaggedTensor(["user", "item", "action"], one, lengths=one),
        batch_size=1,
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        action_feature_name="action",
        labels=KeyedJaggedTensor(["label"], one[:1], lengths=one[:1]),
    )
