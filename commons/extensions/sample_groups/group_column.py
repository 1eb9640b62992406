"""The column of groups, and the search that heeds it; also for the advisor, which runs without torch."""

from __future__ import annotations

import numpy as np

from ...partition import rebalance

# The column of rows with the group of each, int64; negative for none. Partitioners take it by this name.
COLUMN = "groups"


def compile_search() -> None:
    """Compiles, or loads from numba's cache, the search for groups' places."""
    work, home = np.array([2, 5, 7, 2, 5, 1, 5]), np.array([1, 0, 0, 1, 0, 0, 0])
    rebalance(work, home, 2, tolerance=0.0, groups=0 * home)
