"""In which regimes balancing gains: imbalance as loaded and as balanced, by lengths, width and ranks.

Random lengths only, or with MovieLens 100K's too:

    python -m benchmarks.imbalance [FOLDER_WITH_u.data]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from commons.partition import imbalance, karmarkar_karp, lower_bound
from commons.perf_model import HSTUFlops

RESULT = Path(__file__).parent / "results" / "imbalance.json"
ROWS_PER_RANK, DRAWS = 32, 30
WIDTHS, RANKS = (128, 1024), (8, 64)

Lengths = Callable[[np.random.Generator, int], np.ndarray]


def main() -> None:
    """Prints the table and writes it to `RESULT`."""
    datasets: dict[str, Lengths] = {
        "lognormal(5, 1.2) in [1, 4096]": lambda rng, n: rng.lognormal(5, 1.2, n).clip(1, 4096),
        "zipf(1.2) in [1, 4096]": lambda rng, n: rng.zipf(1.2, n).clip(1, 4096),
        "uniform in [1, 200]": lambda rng, n: rng.integers(1, 201, n),
        "all 200": lambda rng, n: np.full(n, 200),
    }
    if len(sys.argv) > 1:
        users = np.loadtxt(Path(sys.argv[1]) / "u.data", usecols=0, dtype=np.int64)
        lengths = np.bincount(users)[1:]
        datasets["ml-100k"] = lambda rng, n: rng.choice(lengths, n)
        datasets["ml-100k, newest 200"] = lambda rng, n: rng.choice(lengths, n).clip(max=200)
    rows = [
        _row(name, draw, width, ranks)
        for name, draw in tqdm(datasets.items(), desc="lengths", leave=False)
        for width in WIDTHS
        for ranks in RANKS
    ]
    columns = f"{'as loaded':>11}{'balanced':>10}{'unequal rows':>14}{'bound':>8}"
    print(f"{'lengths':<32}{'d':>6}{'ranks':>7}{columns}")
    for row in rows:
        print(
            f"{row['lengths']:<32}{row['width']:>6}{row['ranks']:>7}"
            f"{row['as_loaded']:>11.3f}{row['karmarkar_karp']:>10.3f}{row['karmarkar_karp_unequal_rows']:>14.3f}{row['lower_bound']:>8.3f}"
        )
    figures = {"rows_per_rank": ROWS_PER_RANK, "draws": DRAWS, "imbalance": rows}
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _row(name: str, draw: Lengths, width: int, ranks: int) -> dict[str, object]:
    """Mean imbalance over the draws; a history of n items has 2·n + 1 tokens."""
    flops = HSTUFlops(num_layers=1, hidden_size=width, num_heads=1, head_dim=width)
    rng = np.random.default_rng(0)
    results = []
    for _ in range(DRAWS):
        workloads = flops.per_sample(2 * draw(rng, ROWS_PER_RANK * ranks).astype(np.int64) + 1)
        results.append(
            (
                imbalance(workloads, np.split(np.arange(len(workloads)), ranks)),
                imbalance(workloads, karmarkar_karp(workloads, ranks)),
                imbalance(workloads, karmarkar_karp(workloads, ranks, equal_size=False)),
                lower_bound(workloads, ranks, equal_size=False),
            )
        )
    as_loaded, balanced, unequal_rows, bound = np.mean(results, axis=0).tolist()
    return {
        "lengths": name,
        "width": width,
        "ranks": ranks,
        "as_loaded": as_loaded,
        "karmarkar_karp": balanced,
        "karmarkar_karp_unequal_rows": unequal_rows,
        "lower_bound": bound,
    }


if __name__ == "__main__":
    main()
