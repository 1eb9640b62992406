"""A shuffler that is not enabled leaves everything as it is but where samples are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShufflerFactory, IdentityShuffler, batch_shuffler
from tests.commons.histories import TokenShuffler, contents, draw_histories
from tests.commons.pipeline.ranking_pipelines import ranking_pipeline, steps_of
from tests.on_ranks import on_ranks


def batches() -> list[Any]:
    return [draw_histories(np.random.default_rng((dist.get_rank(), number)), 4) for number in range(4)]


def reports(name: str, shuffler: Any) -> list[Any]:
    pipeline = ranking_pipeline(name, shuffler)
    return [pipeline.report for _ in steps_of(pipeline, batches())]


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


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_a_loop_of_ones_own_ends_as_with_balancing(fails):
    def loader():
        yield from batches()[: 4 - 2 * dist.get_rank()]
        if fails and dist.get_rank() == 1:
            raise OSError("no more files")

    found = []
    for enabled in (True, False):
        shuffler, steps = TokenShuffler(enabled=enabled), []
        with pytest.raises(OSError, match="no more files") if fails else nullcontext():
            for batch, plan in shuffler.plan_ahead(loader()):
                loss = shuffler.scale(shuffler.exchange(batch, plan).labels.values().sum(), plan, None)
                steps.append((plan.num_loss_tokens, plan.loads_before.tolist(), loss is not None))
        found.append(steps)
    assert found[0] == found[1] and len(found[0]) == (2 if fails else 4)


@on_ranks(2)
def test_settings_of_placement_have_no_effect_but_ranks_agree_on_this_one():
    shuffler = TokenShuffler(enabled=False, max_tokens=1, tolerance=0.5, partitioner="refined")
    batch = batches()[0]
    moved = shuffler.shuffle(batch)
    assert contents(moved) == contents(batch)
    assert torch.equal(moved.features.values(), batch.features.values())
    with pytest.raises(ValueError, match="shuffler has enabled=False, but rank 0's has True"):
        TokenShuffler(enabled=dist.get_rank() == 0)


def test_enabled_is_a_bool_and_reaches_shufflers_by_name():
    BatchShufflerFactory.register("tokens to be off", TokenShuffler)
    try:
        assert not BatchShufflerFactory.create("tokens to be off", enabled=False).moves_samples
    finally:
        BatchShufflerFactory.unregister("tokens to be off")
    with pytest.raises(TypeError, match=r"TokenShuffler\.enabled = 'no'"):
        TokenShuffler(enabled="no")


@on_ranks(2)
def test_nothing_is_compiled_for_planning_while_it_is_off():
    def fail(*_: Any) -> None:
        raise AssertionError("placement is compiled")

    with mock.patch.object(batch_shuffler, "warm_up", fail):
        for shuffler in (TokenShuffler(enabled=False), IdentityShuffler()):
            assert reports("none", shuffler)
        with pytest.raises(AssertionError, match="placement is compiled"):
            TokenShuffler()
