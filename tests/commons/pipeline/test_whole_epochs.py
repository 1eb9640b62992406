"""Over whole epochs no sample is lost or doubled, however ranks load and balance."""

from typing import Any

import pytest

from tests.commons.pipeline.ranking_pipelines import PIPELINES
from tests.commons.pipeline.whole_epochs import LOADINGS, check_epochs, epochs

SETTINGS: list[dict[str, Any]] = [
    {"equal_rows": False},
    {"partitioner": "rebalance", "exchange": "all_gather"},
]


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("loading", LOADINGS.values(), ids=LOADINGS)
def test_every_sample_is_computed_once_and_all_ranks_know_all_loads(pools, name, loading):
    # All settings where ranks load most differently; elsewhere one of them.
    every_settings = SETTINGS if name == "native" and loading.groups is None else SETTINGS[:1]
    results = pools(len(loading.epochs[0])).run(epochs, name, loading, every_settings)
    check_epochs(results, loading, every_settings, pads=True)
    assert all(len(step.calls) == 1 for _, steps in results[0] for step in steps)
