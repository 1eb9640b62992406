"""A shuffler that is not enabled leaves everything as it is but where samples are."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.distributed import IdentityShuffler
from commons.distributed import shuffler as module_of_shufflers
from tests.commons.histories import TokenShuffler, contents
from tests.commons.pipeline.ranking_pipelines import loaded_histories, ranking_pipeline, steps_of
from tests.on_ranks import on_ranks


def reports(name: str, shuffler: Any) -> list[Any]:
    pipeline = ranking_pipeline(name, shuffler)
    return [pipeline.report for _ in steps_of(pipeline, loaded_histories(4))]


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_reports_are_those_of_balancing_but_for_where_samples_are(name):
    on, off = reports(name, TokenShuffler()), reports(name, TokenShuffler(enabled=False))
    for balanced, as_loaded in zip(on, off, strict=True):
        assert as_loaded.samples_moved == as_loaded.bytes_sent == 0
        assert as_loaded.unit == balanced.unit
        assert as_loaded.lower_bound == balanced.lower_bound
        for loads in (as_loaded.loads_before, as_loaded.loads_after):
            assert loads.tolist() == balanced.loads_before.tolist()
    assert any(report.samples_moved for report in on)


@on_ranks(2)
def test_settings_of_placement_have_no_effect_but_ranks_agree_on_this_one():
    shuffler = TokenShuffler(enabled=False, max_tokens=1, tolerance=0.5, partitioner="refined")
    (batch,) = loaded_histories(1)
    moved = shuffler.shuffle(batch)
    assert contents(moved) == contents(batch)
    assert torch.equal(moved.features.values(), batch.features.values())
    with pytest.raises(ValueError, match="shuffler has enabled=False, but rank 0's has True"):
        TokenShuffler(enabled=dist.get_rank() == 0)
    with pytest.raises(TypeError, match=r"TokenShuffler\.enabled = 'no'"):
        TokenShuffler(enabled="no")


@on_ranks(2)
def test_nothing_is_compiled_for_planning_while_it_is_off():
    def fail(*_: Any) -> None:
        raise AssertionError("placement is compiled")

    with mock.patch.object(module_of_shufflers, "warm_up", fail):
        for shuffler in (TokenShuffler(enabled=False), IdentityShuffler()):
            assert reports("none", shuffler)
        with pytest.raises(AssertionError, match="placement is compiled"):
            TokenShuffler()
