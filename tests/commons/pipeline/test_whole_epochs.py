"""Over whole epochs no sample is lost or doubled, however ranks load, balance, and divide batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from commons.distributed import BatchShuffler, IdentityShuffler
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.pipeline.ranking_pipelines import (
    TokenShuffler,
    contents,
    draw_histories,
    equal_histories,
    num_tokens,
    pipeline_of,
    ranking_pipeline,
    sharded_ranking_model,
    steps_of,
)

ROWS = 3


@dataclass(frozen=True)
class Loading:
    """How many batches each rank loads in each epoch, and the ranks that balance together."""

    epochs: tuple[tuple[int, ...], ...]
    groups: Sequence[Sequence[int]] | None = None

    def shuffler(self, **settings: Any) -> BatchShuffler:
        """Makes this rank's shuffler; one for groups of one rank is the identity."""
        if self.groups is None:
            return TokenShuffler(**settings, verify=True)
        made = [dist.new_group(ranks) for ranks in self.groups]
        if all(len(ranks) == 1 for ranks in self.groups):
            return IdentityShuffler(get_workloads=lambda batch: batch.num_tokens() ** 2, **settings)
        (mine,) = (group for group in made if dist.get_rank(group) >= 0)
        return TokenShuffler(mine, **settings)


LOADINGS = {
    "two ranks": Loading(((5, 5), (6, 3), (4, 0))),
    "three ranks": Loading(((4, 1, 0), (2, 0, 3))),
    "pairs": Loading(((4, 2, 1, 1), (0, 4, 0, 0)), groups=[[0, 1], [2, 3]]),
    "one alone": Loading(((2, 4, 3), (0, 3, 1)), groups=[[0, 2], [1]]),
    "identity": Loading(((4, 2), (0, 3)), groups=[[0], [1]]),
}
SETTINGS: list[dict[str, Any]] = [
    {"partitioner": "rebalance", "exchange": "all_gather"},
    {"equal_rows": False},
    {"max_tokens_per_micro_batch": 16},
    {"equal_rows": False, "partitioner": "karmarkar_karp", "max_tokens_per_micro_batch": 16},
]


@dataclass(frozen=True)
class Step:
    """A step on one rank: samples of each micro-batch, rows, loss tokens of all ranks, and the report."""

    micro_batches: list[list[tuple]]
    rows: int
    loss_tokens: int
    num_samples: int
    loads: list[float]


def _epochs(name: str, loading: Loading, every_settings: list[dict[str, Any]]) -> list[tuple]:
    """Returns for each of the settings and each epoch the samples that this rank loaded, and its steps."""
    model, optimizer = sharded_ranking_model()
    computed: list[Any] = []
    model.module.dense.register_forward_pre_hook(lambda module, args: computed.append(args[1]))
    rng = np.random.default_rng((7, dist.get_rank()))
    results = []
    for settings in every_settings:
        pipeline = pipeline_of(name, model, optimizer, loading.shuffler(**settings))
        for num_batches in loading.epochs:
            batches = [draw_histories(rng, ROWS) for _ in range(num_batches[dist.get_rank()])]
            steps = []
            for loss_sum, loss_tokens, outputs in steps_of(pipeline, batches):
                assert bool(loss_sum.isfinite())
                count = pipeline.plan.step["num_micro_batches"]
                assert len(computed) == max(count, 1) and (count == 0 or len(outputs) == count)
                assert pipeline.report.num_micro_batches == len(computed)
                steps.append(
                    Step(
                        micro_batches=list(map(contents, computed)),
                        rows=sum(batch.batch_size for batch in computed),
                        loss_tokens=loss_tokens,
                        num_samples=pipeline.num_samples,
                        loads=pipeline.report.loads_after.tolist(),
                    )
                )
                computed.clear()
            results.append(([content for batch in batches for content in contents(batch)], steps))
    return results


def _check_epoch(of_ranks: list[tuple], num_steps: int, cap: int | None, equal_rows: bool) -> None:
    loaded = Counter(sample for of_rank, _ in of_ranks for sample in of_rank)
    assert loaded == Counter(
        sample for _, steps in of_ranks for step in steps for one in step.micro_batches for sample in one
    )
    assert [len(steps) for _, steps in of_ranks] == [num_steps] * len(of_ranks)
    for step in zip(*(steps for _, steps in of_ranks), strict=True):
        samples = [[sample for one in of_rank.micro_batches for sample in one] for of_rank in step]
        # Every rank has the loads of all, and as many micro-batches.
        loads = [sum(num_tokens(sample) ** 2 for sample in of_rank) for of_rank in samples]
        labels = sum(len(sample[-1]) for of_rank in samples for sample in of_rank)
        for of_rank, mine in zip(step, samples, strict=True):
            assert (of_rank.loads, of_rank.loss_tokens) == (loads, labels)
            assert of_rank.num_samples == len(mine)
            assert len(of_rank.micro_batches) == len(step[0].micro_batches)
            for one in of_rank.micro_batches if cap else []:
                assert len(one) <= 1 or sum(map(num_tokens, one)) <= cap
        if equal_rows and cap is None:
            assert len({of_rank.rows for of_rank in step}) == 1


@pytest.mark.parametrize("name", ["none", "native"])
@pytest.mark.parametrize("loading", LOADINGS.values(), ids=LOADINGS)
def test_every_sample_is_computed_once_and_all_ranks_know_all_loads(pools, name, loading):
    # All settings where ranks load most differently; elsewhere two of them.
    every_settings = SETTINGS if name == "native" and loading.groups is None else SETTINGS[1:3]
    results = pools(len(loading.epochs[0])).run(_epochs, name, loading, every_settings)
    runs = product(every_settings, loading.epochs)
    for (settings, num_batches), *of_ranks in zip(runs, *results, strict=True):
        equal_rows = loading.groups is None and settings.get("equal_rows", True)
        _check_epoch(of_ranks, max(num_batches), settings.get("max_tokens_per_micro_batch"), equal_rows)
    assert max(len(step.micro_batches) for _, steps in results[0] for step in steps) > 1


def _one_batch_at_a_time(name: str) -> list[int]:
    """Returns the loss tokens of steps that each get an iterator of their own, and of one after a reset."""
    pipeline = ranking_pipeline(name, TokenShuffler(verify=True))
    rank = dist.get_rank()
    tokens = [pipeline.progress(iter([equal_histories(ROWS, n + rank)]))[1] for n in (1, 2, 3, 4)]
    pipeline.progress(iter([equal_histories(ROWS, 9)] * 4))
    pipeline.reset()
    tokens.append(pipeline.progress(iter([equal_histories(ROWS, 2)]))[1])
    pipeline.reset()
    return tokens


@pytest.mark.parametrize("name", ["none", "native"])
def test_a_new_iterator_loses_no_batch_and_a_reset_drops_those_on_their_way(pools, name):
    expected = [ROWS * (n + n + 1) for n in (1, 2, 3, 4)] + [2 * ROWS * 2]
    assert pools(2).run(_one_batch_at_a_time, name) == [expected] * 2


def _posted(name: str) -> list[tuple[Counter, list[list[int]]]]:
    """Returns the collectives of an epoch and what ranks posted in each step, without a post and with one."""
    rank, results = dist.get_rank(), []
    for posts in (False, True):
        pipeline = ranking_pipeline(name, TokenShuffler())
        calls = iter(range(100))
        if posts:
            pipeline.post(lambda calls=calls: 10 * next(calls) + rank)
        with recorded_collectives() as recorded:
            steps = [pipeline.posted.tolist() for _ in steps_of(pipeline, [equal_histories(ROWS, 2)] * 4)]
        results.append((Counter(name for name, _ in recorded), steps))
    return results


@pytest.mark.parametrize(("name", "ahead"), [("none", 0), ("native", 2)])
def test_posts_reach_all_ranks_in_the_same_step_without_another_collective(pools, name, ahead):
    for (collectives, nothing), (collectives_with_post, posted) in pools(2).run(_posted, name):
        assert collectives == collectives_with_post and collectives["all_gather"] > 0
        assert nothing == [[0, 0]] * 4
        plans = [min(step + ahead, 3) for step in range(4)]  # the newest one that was handed out
        assert posted == [[10 * plan, 10 * plan + 1] for plan in plans]
