"""Row tables and plans drawn at random, without processes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from commons.distributed import ShufflePlan
from commons.distributed.row_table import RowTable

PIECE = np.dtype([("first", np.int64), ("last", np.int64)])


def draw_rows(rng: np.random.Generator, num_ranks: int, most_rows: int = 4) -> RowTable:
    """Draws a table of whole samples and pieces; workloads are the rows' numbers."""
    batch_sizes = rng.integers(0, most_rows + 1, num_ranks)
    num_loaded = rng.integers(0, batch_sizes + 1)
    count = int(num_loaded.sum())
    starts_sample = rng.random(count) < 0.7
    starts_sample[(np.cumsum(num_loaded) - num_loaded)[num_loaded > 0]] = True
    pieces = np.zeros(count, dtype=PIECE)
    pieces["first"], pieces["last"] = rng.integers(0, 9, (2, count))
    return RowTable(
        batch_sizes=batch_sizes,
        num_loaded=num_loaded,
        workloads=np.arange(count),
        tokens=rng.integers(0, 9, count),
        loss_tokens=rng.integers(0, 9, count),
        key_lengths=rng.integers(0, 9, (count, 2)),
        sample_bytes=rng.integers(1, 99, count),
        row_counts=rng.integers(0, 9, (count, 3)),
        work=rng.integers(0, 9, (count, 2)),
        starts_sample=starts_sample,
        columns={"user": rng.integers(-9, 9, count), "pieces": pieces, "pairs": rng.random((count, 2))},
        speeds=None if rng.random() < 0.5 else 1 + rng.random(num_ranks),
        ranks_per_node=None if rng.random() < 0.5 else 1,
    )


@st.composite
def tables(draw) -> tuple[RowTable, np.random.Generator]:
    """Draws a table, and numbers to draw more from."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    return draw_rows(rng, draw(st.integers(1, 5))), rng


@st.composite
def plans(draw) -> ShufflePlan:
    """Draws a plan."""
    rows, rng = draw(tables())
    destination = rng.integers(0, rows.num_ranks, len(rows.home))
    return ShufflePlan(
        rows,
        destination,
        num_rows=np.maximum(np.bincount(destination, minlength=rows.num_ranks), 1),
        predicted_seconds=None if rng.random() < 0.5 else rng.random(rows.num_ranks),
        num_parts=int(rng.integers(0, 5)),
    )
