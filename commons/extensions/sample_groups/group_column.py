"""The column of groups, and the search that uses it. The advisor, which runs without torch, uses both."""

from __future__ import annotations

import numpy as np

from ...partition import rebalance

# Name of the column with each row's group, int64, negative for none. Partitioners take it by this name.
COLUMN = "groups"


def compile_search() -> None:
    """Compiles the search that places groups, or loads it from numba's cache."""
    work, home = np.array([2, 5, 7, 2, 5, 1, 5]), np.array([1, 0, 0, 1, 0, 0, 0])
    rebalance(work, home, 2, tolerance=0.0, groups=0 * home)
