"""The four kinds of lengths of the benchmark, and steps of such rows as planning sees them."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.partition.placements import (
    KUAIRAND,
    RANKS_PER_NODE,
    ROWS_PER_RANK,
    YAMBDA,
    Lengths,
    list_lengths,
)
from commons.distributed.plan import RowTable

SHORT = "lognormal(4.2, 1.0) in [20, 200]"
_KNOWN = list_lengths(None)
KINDS: dict[str, Lengths] = {
    SHORT: lambda rng, n: rng.lognormal(4.2, 1.0, n).clip(20, 200).astype(np.int64),
    "Yambda-like, newest 8,192": lambda rng, n: _KNOWN[YAMBDA](rng, n).clip(max=8192),
    "uniform in [1, 4096]": lambda rng, n: rng.integers(1, 4097, n),
    "KuaiRand-like, newest 4,096": lambda rng, n: _KNOWN[KUAIRAND](rng, n).clip(max=4096),
}
BYTES_PER_TOKEN = 16  # an id and a label


def load_rows(lengths: np.ndarray, workloads: np.ndarray, **arguments: Any) -> RowTable:
    """Returns a step in which each rank loaded `ROWS_PER_RANK` of these rows.

    Args:
        lengths, workloads: tokens and cost of each row, int64 `[rows]`.
        arguments: partitioner arguments, as extensions give them.
    """
    per_rank = np.full(len(lengths) // ROWS_PER_RANK, ROWS_PER_RANK)
    none = np.zeros((len(lengths), 0), dtype=np.int64)
    return RowTable(
        batch_sizes=per_rank,
        num_loaded=per_rank,
        workloads=workloads,
        tokens=lengths,
        loss_tokens=lengths,
        key_lengths=none,
        sample_bytes=BYTES_PER_TOKEN * lengths,
        arguments=arguments,
        ranks_per_node=RANKS_PER_NODE if len(per_rank) > RANKS_PER_NODE else None,
    )
