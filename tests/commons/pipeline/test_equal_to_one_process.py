"""Ranks with any container and loss reduction learn what one process with the whole batches learns."""

from itertools import product

import pytest

from tests.commons.pipeline.ranking_pipelines import OTHERS
from tests.commons.pipeline.scored_samples import MAKE, WEIGHTED, Run, check_runs

REDUCTIONS = ("sum", "mean", "global_mean")
# On three ranks: fewer samples than ranks, and samples that one rank has loaded.
FEW, ALL_ON_ONE = ((2, 2, 2), (1, 1, 0)), ((4, 4, 4), (0, 5, 0))
RUNS = {
    **{
        kind: [
            Run(kind, reduction, settings={"equal_rows": equal})
            for reduction, equal in product(REDUCTIONS, (True, False))
            if equal or kind in ("dict", "base")
        ]
        for kind in MAKE
    },
    "weights": [
        Run(kind, reduction, settings=settings)
        for kind, reduction, settings in product(WEIGHTED, REDUCTIONS[:2], ({}, None))
    ],
    "sharded tables": [
        *(
            Run(kind, name="native", sharded="table")
            for kind in ("torchrec", "dict", "named tuple", "dataclass")
        ),
        *(Run(name=name, sharded="table") for name in OTHERS if name != "semi_sync"),
        Run("dataclass", sharded="table"),
        Run("base", name="native", sharded="row"),
    ],
    "nothing moves": [
        Run(rows=rows, settings=settings, name=name, sharded=sharded)
        for settings in (None, {"enabled": False})
        for rows in (((6, 5), (3, 2)), ((4, 2), (4, 0)))
        for name, sharded in (("none", ""), ("native", "table"))
    ],
    "a rank without samples": [
        Run(kind, reduction, rows, settings=settings)
        for kind, reduction in product(("dict", "dataclass", "base"), REDUCTIONS[:2])
        for rows, settings in ((FEW, {}), (ALL_ON_ONE, {"equal_rows": False}))
    ],
    "more ranks than samples": [Run(rows=((0, 0, 0, 3), (0, 0, 0, 2)))],
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_a_step_learns_what_one_process_learns(pools, runs):
    check_runs(pools(len(runs[0].rows[0])), runs)
