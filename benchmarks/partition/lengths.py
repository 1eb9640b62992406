"""The history lengths that are balanced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

# The lengths of that many histories.
Lengths = Callable[[np.random.Generator, int], np.ndarray]

ML_100K, ML_100K_NEWEST = "ml-100k", "ml-100k, newest 200"
LOGNORMAL, ZIPF, UNIFORM = "lognormal(5, 1.2)", "zipf(1.2)", "uniform in [1, 200]"
PARETO_1_6, PARETO_1_1 = "Pareto(1.6) to 4096", "Pareto(1.1) to 16384"
LONG = "lognormal, median 8591"
LONGEST, NEWEST = 4096, 200
# Public data sets' mean and median events of a user, and the most; KuaiRand-27K has at least 100 of each.
YAMBDA, KUAIRAND, TAOBAO = "Yambda-5B", "KuaiRand-27K", "Taobao"
PUBLISHED = {
    YAMBDA: (4763, 2695, 1, 27_738),
    KUAIRAND: (11_796, 8591, 100, 228_000),
    TAOBAO: (101.4, 75, 1, 848),
}


def find_movielens(given: Path | None) -> Path | None:
    """Returns the folder with MovieLens 100K that a command line names, if it is there."""
    if given is not None and (given / "u.data").exists():
        return given
    place = "no folder with u.data was named" if given is None else f"no u.data in {given}"
    print(f"without MovieLens 100K: {place}; its rows are left out, and nothing is written", file=sys.stderr)
    return None


def read_movielens_lengths(movielens: Path) -> np.ndarray:
    """Returns how many ratings each user has, int64 `[users]`, from MovieLens 100K's `u.data`."""
    users = np.loadtxt(movielens / "u.data", usecols=0, dtype=np.int64)
    return np.bincount(users)[1:]  # users count from 1


def draw_lognormal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws heavy-tailed lengths, as histories are that nobody caps."""
    return rng.lognormal(5, 1.2, count).clip(1, LONGEST).astype(np.int64)


def list_lengths(movielens: Path | None) -> dict[str, Lengths]:
    """Returns lengths by name; MovieLens 100K's, with replacement, if the folder with `u.data` is given."""
    lengths: dict[str, Lengths] = {}
    if movielens is not None:
        ratings = read_movielens_lengths(movielens)
        lengths[ML_100K] = lambda rng, n: rng.choice(ratings, n)
        lengths[ML_100K_NEWEST] = lambda rng, n: rng.choice(ratings, n).clip(max=NEWEST)
    lengths[LOGNORMAL] = draw_lognormal
    lengths[ZIPF] = lambda rng, n: rng.zipf(1.2, n).clip(1, LONGEST)
    lengths[UNIFORM] = lambda rng, n: rng.integers(1, NEWEST + 1, n)
    lengths |= {name: _fit_lognormal(*figures) for name, figures in PUBLISHED.items()}
    # So long that whole histories cannot be balanced.
    lengths[PARETO_1_6] = lambda rng, n: (20 * (1 + rng.pareto(1.6, n))).clip(max=4096)
    lengths[PARETO_1_1] = lambda rng, n: (10 * (1 + rng.pareto(1.1, n))).clip(max=16384)
    lengths[LONG] = lambda rng, n: rng.lognormal(np.log(8591), 1.2, n).clip(1, 65536)
    return lengths


def _fit_lognormal(mean: float, median: float, least: int, most: int) -> Lengths:
    """Returns lognormal lengths with this mean and median, before they are clipped to `least` and `most`."""
    location, scale = np.log(median), np.sqrt(2 * np.log(mean / median))
    return lambda rng, n: rng.lognormal(location, scale, n).clip(least, most).astype(np.int64)
