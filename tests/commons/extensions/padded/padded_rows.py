"""Rows of steps, as padded models see them."""

from typing import Any

import numpy as np

from tests.commons.distributed.internals import RowTable


def table(
    work: np.ndarray,
    num_loaded: np.ndarray,
    padding: int = 0,
    loss_tokens: np.ndarray | None = None,
    **more: Any,
) -> RowTable:
    """Returns a table of samples with this work, `[samples, columns]`, and padding on each rank."""
    tokens, none = work.sum(1), np.zeros((len(work), 0), dtype=np.int64)
    return RowTable(
        batch_sizes=num_loaded + padding * (num_loaded > 0),
        num_loaded=num_loaded,
        workloads=tokens,
        tokens=tokens,
        loss_tokens=np.ones_like(tokens) if loss_tokens is None else loss_tokens,
        key_lengths=none,
        sample_bytes=8 * tokens,
        work=work,
        **more,
    )


def draw_table(rng: np.random.Generator, num_columns: int = 1, **more: Any) -> RowTable:
    """Returns a table of two to six ranks; some may have no samples, and some samples no loss tokens."""
    num_loaded = rng.integers(0, 9, rng.integers(2, 7))
    num_loaded[0] += 1
    spread = rng.choice([0.3, 1.0, 2.0])
    work = rng.lognormal(2.5, spread, (num_loaded.sum(), num_columns)).astype(np.int64)
    loss_tokens = rng.integers(0, 3, len(work))
    return table(work, num_loaded, int(rng.integers(0, 3)), loss_tokens, **more)


def costs(
    rows: RowTable, rank_of: np.ndarray, num_rows: np.ndarray, of: np.ndarray | None = None
) -> np.ndarray:
    """Returns what ranks cost, rank by rank: rows × the largest of each column."""
    work = rows.work if of is None else of
    own = [work[rank_of == rank] for rank in range(rows.num_ranks)]
    return np.array([n * w.max(0, initial=0).sum() for n, w in zip(num_rows, own, strict=True)])
