"""Over whole epochs no sample is lost or doubled, however ranks load and balance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.shufflers import Posting
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import ranking_pipeline, steps_of
from tests.commons.pipeline.whole_epochs import LOADINGS, ROWS, check_epochs, epochs
from tests.on_ranks import on_ranks

SETTINGS: list[dict[str, Any]] = [
    {"equal_rows": False},
    {"partitioner": "rebalance", "exchange": "all_gather"},
]


@pytest.mark.parametrize("name", ["none", "native"])
@pytest.mark.parametrize("loading", LOADINGS.values(), ids=LOADINGS)
def test_every_sample_is_computed_once_and_all_ranks_know_all_loads(pools, name, loading):
    # All settings where ranks load most differently; elsewhere one of them.
    every_settings = SETTINGS if name == "native" and loading.groups is None else SETTINGS[:1]
    results = pools(len(loading.epochs[0])).run(epochs, name, loading, every_settings)
    check_epochs(results, loading, every_settings, pads=True)
    assert all(len(step.calls) == 1 for _, steps in results[0] for step in steps)


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_a_new_iterator_loses_no_batch_and_a_reset_drops_those_on_their_way(name):
    pipeline = ranking_pipeline(name, TokenShuffler())
    rank = dist.get_rank()
    tokens = []
    for n in (1, 2, 3, 4):
        pipeline.progress(iter([histories([n + rank] * ROWS)]))
        tokens.append(pipeline.loss_tokens)
    pipeline.progress(iter([histories([9] * ROWS)] * 4))
    pipeline.reset()
    pipeline.progress(iter([histories([2] * ROWS)]))
    tokens.append(pipeline.loss_tokens)
    pipeline.reset()
    expected = [ROWS * (n + n + 1) for n in (1, 2, 3, 4)] + [2 * ROWS * 2]
    assert tokens == expected


@pytest.mark.parametrize(("name", "ahead"), [("none", 0), ("native", 2)])
@on_ranks(2)
def test_posts_reach_all_ranks_in_the_same_step_without_another_collective(name, ahead):
    results = []
    for posts in (False, True):
        posting = Posting()
        pipeline = ranking_pipeline(name, TokenShuffler(extensions=[posting] if posts else []))
        with recorded_collectives() as recorded:
            steps = [posting.newest for _ in steps_of(pipeline, [histories([2] * ROWS)] * 4)]
        results.append((Counter(name for name, _ in recorded), steps))
    (collectives, _), (collectives_with_post, posted) = results
    assert collectives == collectives_with_post and collectives["all_gather"] > 0
    plans = [min(step + ahead, 3) for step in range(4)]  # the newest one that was handed out
    assert posted == [[10 * plan, 10 * plan + 1] for plan in plans]
