"""Cost of planning and bytes of the exchange at up to 1,024 ranks: from real plans, without processes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.partition.lengths import Lengths
from benchmarks.partition.placements import BYTES_PER_TOKEN, ROWS_PER_RANK, workloads_of
from commons.distributed.exchange import EXCHANGES
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.placement import place, warm_up
from commons.distributed.shuffler_settings import ShufflerSettings

RANKS, HIDDEN_SIZE, DRAWS = (2, 4, 8, 64, 256, 1024), 128, 10
PARTITIONERS = ("karmarkar_karp", "rebalance", "refined")


def measure(lengths: dict[str, Lengths]) -> list[dict[str, Any]]:
    """A record for each lengths and number of ranks."""
    warm_up(ShufflerSettings())
    cases = [(name, ranks) for name in lengths for ranks in RANKS]
    return [_measure(name, lengths[name], ranks) for name, ranks in tqdm(cases, desc="planning")]


def _measure(name: str, lengths: Lengths, ranks: int) -> dict[str, Any]:
    rng = np.random.default_rng([0, ranks])
    milliseconds: dict[str, list[float]] = {partitioner: [] for partitioner in PARTITIONERS}
    sent: dict[str, list[float]] = {partitioner: [] for partitioner in PARTITIONERS}
    gathered = []
    for _ in range(DRAWS):
        loaded = _draw(rng, lengths, ranks)
        for partitioner in PARTITIONERS:
            settings = ShufflerSettings(partitioner)
            start = time.perf_counter()
            plan = place(loaded, settings)
            milliseconds[partitioner].append((time.perf_counter() - start) * 1e3)
            of_ranks = [EXCHANGES["all_to_all"].traffic(plan, rank).sent for rank in range(ranks)]
            sent[partitioner].append(float(np.mean(of_ranks)))
        gathered.append(EXCHANGES["all_gather"].traffic(plan, 0).received)
    return {
        "lengths": name,
        "ranks": ranks,
        "partition_ms": {key: round(float(np.median(values)), 3) for key, values in milliseconds.items()},
        "kilobytes_sent_per_rank": {key: round(float(np.mean(of)) / 1e3, 2) for key, of in sent.items()},
        "kilobytes_received_by_all_gather": round(float(np.mean(gathered)) / 1e3, 1),
    }


def _draw(rng: np.random.Generator, lengths: Lengths, ranks: int) -> LoadedSamples:
    workloads, tokens = workloads_of(lengths(rng, ROWS_PER_RANK * ranks), HIDDEN_SIZE)
    rows = np.full(ranks, ROWS_PER_RANK)
    sizes = BYTES_PER_TOKEN * tokens
    return LoadedSamples(rows, rows, workloads, tokens, tokens, tokens[:, None], sizes, tokens[:, None])
