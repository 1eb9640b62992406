"""The history lengths that are balanced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

# The lengths of that many histories.
Lengths = Callable[[np.random.Generator, int], np.ndarray]

ML_100K, ML_100K_NEWEST = "ml-100k", "ml-100k, newest 200"
LOGNORMAL, ZIPF = "lognormal(5, 1.2)", "zipf(1.2)"
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


def movielens_folder(given: Path | None) -> Path | None:
    """Returns the folder with MovieLens 100K that a command line names, if it is there."""
    if given is not None and (given / "u.data").exists():
        return given
    place = "no folder with u.data was named" if given is None else f"no u.data in {given}"
    print(f"without MovieLens 100K: {place}; its rows are left out, and nothing is written", file=sys.stderr)
    return None


def movielens_lengths(movielens: Path) -> np.ndarray:
    """int64 `[users]`: how many ratings each user has, given the folder with MovieLens 100K's `u.data`."""
    users = np.loadtxt(movielens / "u.data", usecols=0, dtype=np.int64)
    return np.bincount(users)[1:]  # users count from 1


def all_lengths(movielens: Path | None) -> dict[str, Lengths]:
    """By name; MovieLens 100K's if the folder with its `u.data` is given. Draws are with replacement."""
    lengths: dict[str, Lengths] = {}
    if movielens is not None:
        ratings = movielens_lengths(movielens)
        lengths[ML_100K] = lambda rng, n: rng.choice(ratings, n)
        lengths[ML_100K_NEWEST] = lambda rng, n: rng.choice(ratings, n).clip(max=NEWEST)
    lengths[LOGNORMAL] = lognormal
    lengths[ZIPF] = lambda rng, n: rng.zipf(1.2, n).clip(1, LONGEST)
    lengths["uniform in [1, 200]"] = lambda rng, n: rng.integers(1, NEWEST + 1, n)
    return lengths | {name: _lognormal_of(*figures) for name, figures in PUBLISHED.items()}


def lognormal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Heavy-tailed, as histories are that nobody caps."""
    return rng.lognormal(5, 1.2, count).clip(1, LONGEST).astype(np.int64)


def _lognormal_of(mean: float, median: float, least: int, most: int) -> Lengths:
    """Returns lognormal lengths with this mean and median, before they are clipped to `least` and `most`."""
    of_log, spread = np.log(median), np.sqrt(2 * np.log(mean / median))
    return lambda rng, n: rng.lognormal(of_log, spread, n).clip(least, most).astype(np.int64)


def long_tailed_lengths() -> dict[str, Lengths]:
    """By name; histories so long that whole ones cannot be balanced."""
    return {
        LOGNORMAL: lognormal,
        PARETO_1_6: lambda rng, n: (20 * (1 + rng.pareto(1.6, n))).clip(max=4096),
        PARETO_1_1: lambda rng, n: (10 * (1 + rng.pareto(1.1, n))).clip(max=16384),
        LONG: lambda rng, n: rng.lognormal(np.log(8591), 1.2, n).clip(1, 65536),
    }
