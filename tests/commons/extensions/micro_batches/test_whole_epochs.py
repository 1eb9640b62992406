"""Over whole epochs of micro-batches no sample is lost or doubled, and all ranks have as many."""

from typing import Any

import pytest

from tests.commons.extensions.micro_batches.divided import in_micro_batches
from tests.commons.histories import num_tokens
from tests.commons.pipeline.whole_epochs import LOADINGS, check_epochs, epochs

CAP = 16
SETTINGS: list[dict[str, Any]] = [
    {"extensions": in_micro_batches(CAP)},
    {"equal_rows": False, "partitioner": "karmarkar_karp", "extensions": in_micro_batches(CAP)},
]


@pytest.mark.parametrize("name", ["none", "native"])
@pytest.mark.parametrize("loading", LOADINGS.values(), ids=LOADINGS)
def test_every_sample_is_computed_once_and_all_ranks_know_all_loads(pools, name, loading):
    every_settings = SETTINGS if name == "native" and loading.groups is None else SETTINGS[:1]
    results = pools(len(loading.epochs[0])).run(epochs, name, loading, every_settings)
    check_epochs(results, loading, every_settings, pads=False)
    calls = [step.calls for of_rank in results for _, steps in of_rank for step in steps]
    assert all(len(one) <= 1 or sum(map(num_tokens, one)) <= CAP for of_step in calls for one in of_step)
    assert max(map(len, calls)) > 1
