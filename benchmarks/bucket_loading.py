"""Compares how well plain loading, exchanges and `BucketSampler` balance ranks.

Computes loads over whole epochs of random histories, and of MovieLens 100K if its folder is given:

    python -m benchmarks.bucket_loading [FOLDER_WITH_u.data]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.markdown import markdown_table, write_tables
from benchmarks.partition.lengths import LOGNORMAL, ML_100K, lognormal, movielens_folder, movielens_lengths
from benchmarks.partition.placements import workloads_of
from commons.datasets import BucketSampler, SequenceDataset
from commons.partition import loads, refined, step_ratios
from commons.partition.balance import relative_to_mean

BENCHMARKS = Path(__file__).parent
RESULT, README = BENCHMARKS / "results" / "bucket_loading.json", BENCHMARKS / "README.md"
RANKS, ROWS_PER_RANK, HIDDEN_SIZES = 8, (32, 8), (128, 1024)
EPOCHS = 20
NUM_LOGNORMAL = 8192
QUALITIES = ("mean_imbalance", "largest_loads_over_ideal", "largest_step_ratio")

# Indices of each rank's samples, for each step of an epoch.
Steps = list[list[np.ndarray]]
# Returns the steps of an epoch, given workloads `[samples]`, rows per rank and the epoch's number.
Loading = Callable[[np.ndarray, int, int], Steps]


class _Indices:
    """Source whose samples are their indices, and whose batches are lists of them."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: Sequence[int], batch_size: int) -> Any:
        return samples


def _as_loaded(workloads: np.ndarray, rows: int, epoch: int) -> Steps:
    source = _Indices(len(workloads))
    datasets = [SequenceDataset(source, rows, rank, RANKS, shuffle=True) for rank in range(RANKS)]
    return _epoch(datasets, epoch)


def _exchanged(workloads: np.ndarray, rows: int, epoch: int) -> Steps:
    steps = [np.concatenate(step) for step in _as_loaded(workloads, rows, epoch)]
    return [[step[part] for part in refined(workloads[step], RANKS)] for step in steps]


def _in_buckets(num_buckets: int) -> Loading:
    def load(workloads: np.ndarray, rows: int, epoch: int) -> Steps:
        samplers = [BucketSampler(workloads, rows, rank, RANKS, num_buckets) for rank in range(RANKS)]
        return _epoch(samplers, epoch)

    return load


def _epoch(by_rank: Sequence[Any], epoch: int) -> Steps:
    """Returns the steps of the ranks' datasets or samplers."""
    for of_rank in by_rank:
        of_rank.set_epoch(epoch)
    steps = zip(*by_rank, strict=True)
    return [[np.array(batch, dtype=np.int64) for batch in step] for step in steps]


LOADINGS: dict[str, Loading] = {
    "as loaded": _as_loaded,
    "exchanged, refined": _exchanged,
    "1 bucket": _in_buckets(1),
    "4 buckets": _in_buckets(4),
    "8 buckets": _in_buckets(8),
}


def main() -> None:
    """Prints the table; if it is complete, also writes it to `README` and the figures to `RESULT`."""
    movielens = movielens_folder(parse_arguments(__doc__, folder={"type": Path, "nargs": "?"}).folder)
    records = _measure(_all_lengths(movielens))
    table = make_table(records)
    print(table)
    if movielens is None:
        return
    figures = {"ranks": RANKS, "epochs": EPOCHS, "records": records}
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(README, "loading", {"balance": table})
    print(f"\nwritten: {RESULT.relative_to(BENCHMARKS.parent)}, {README.relative_to(BENCHMARKS.parent)}")


def _all_lengths(movielens: Path | None) -> dict[str, np.ndarray]:
    """Returns history lengths of whole datasets by name: those of MovieLens, and random ones."""
    lengths = {}
    if movielens is not None:
        lengths[ML_100K] = movielens_lengths(movielens)
    lengths[LOGNORMAL] = lognormal(np.random.default_rng(0), NUM_LOGNORMAL)
    return lengths


def _measure(all_lengths: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Returns a record per lengths, rows per rank, hidden size and loading: means over the epochs."""
    records = []
    cases = list(product(all_lengths, ROWS_PER_RANK, HIDDEN_SIZES))
    for name, rows, hidden_size in tqdm(cases, desc="loading"):
        workloads = workloads_of(all_lengths[name], hidden_size)[0]
        for loading, load in LOADINGS.items():
            epochs = (load(workloads, rows, epoch) for epoch in range(EPOCHS))
            qualities = [_quality(workloads, steps, rows) for steps in epochs]
            means = {key: float(np.mean([each[key] for each in qualities])) for key in QUALITIES}
            records.append(
                {
                    "lengths": name,
                    "samples": len(workloads),
                    "rows_per_rank": rows,
                    "hidden_size": hidden_size,
                    "loading": loading,
                    **{key: round(mean, 5) for key, mean in means.items()},
                }
            )
    return records


def _quality(workloads: np.ndarray, steps: Steps, rows: int) -> dict[str, float]:
    """Measures one epoch. An incomplete step counts like any other, except in the step ratio."""
    step_loads = [loads(workloads, step) for step in steps]
    complete = [step for step in steps if sum(map(len, step)) == rows * RANKS]
    return {
        "mean_imbalance": float(np.mean([relative_to_mean(each) for each in step_loads])),
        "largest_loads_over_ideal": sum(each.max() for each in step_loads) / (workloads.sum() / RANKS),
        "largest_step_ratio": float(step_ratios(workloads, complete).max()),
    }


def make_table(records: list[dict[str, Any]]) -> str:
    """Returns a table with a row per lengths, rows and hidden size, and a column per loading."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        case = (record["lengths"], f"{record['rows_per_rank']}", f"{record['hidden_size']}")
        cell = " / ".join(f"{record[key]:.3f}" for key in QUALITIES)
        cases.setdefault(case, []).append(cell)
    titles = ["lengths", "rows", "d", *LOADINGS]
    return markdown_table(titles, [[*case, *cells] for case, cells in cases.items()])


if __name__ == "__main__":
    main()
