"""In micro-batches, any container and loss reduction learns what one process with the whole batch learns."""

from __future__ import annotations

from itertools import product

import pytest

from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.extensions.micro_batches.divided import in_micro_batches
from tests.commons.pipeline.scored_samples import (
    UNEVEN,
    WITHOUT_SAMPLES,
    check_scored,
    scored_pipeline,
    scored_steps,
)


@pytest.mark.parametrize("kind", ["dict", "named tuple", "base"])
def test_micro_batches_of_any_container(pools, kind):
    settings = {"extensions": in_micro_batches(12)}
    cases = [(kind, reduction, rows, settings) for reduction in ("sum", "mean") for rows in [*UNEVEN, (7, 0)]]
    check_scored(pools(2).run(scored_steps, cases), cases)
    cases = [
        (kind, reduction, WITHOUT_SAMPLES, settings | {"equal_rows": equal})
        for reduction, equal in product(("sum", "mean"), (True, False))
    ]
    check_scored(pools(3).run(scored_steps, cases), cases)


def _error_of_a_global_mean() -> str:
    return error_of(scored_pipeline, "dict", "global_mean", extensions=in_micro_batches(9))


def test_a_global_mean_is_refused(pools):
    for error in pools(2).run(_error_of_a_global_mean):
        assert error.startswith('ValueError: loss_reduction="global_mean" is for a whole step')
