"""Extensions, alone and together, change nothing that a step learns."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler, Extension, ShufflePlan
from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.padded import Padded
from commons.extensions.sample_groups import SampleGroups
from commons.extensions.unshuffle import Unshuffle
from commons.extensions.verification import Verification
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.pipeline.ranking_pipelines import OTHERS, PIPELINES
from tests.commons.pipeline.scored_samples import WEIGHTED, Run, as_computed, check_runs, trained
from tests.commons.pipeline.weighted_means import check_means_over_none
from tests.on_ranks import on_ranks

SMALL, LARGE = 12, 10**6


def _of(shuffler: BatchShuffler, kind: type) -> Any:
    return next((extension for extension in shuffler.extensions if isinstance(extension, kind)), None)


def scores_of(shuffler: BatchShuffler, plan: ShufflePlan, output: Any) -> tuple[list[int], torch.Tensor]:
    """Returns numbers and scores of samples: those that this rank has loaded, if results come back."""
    if micro := _of(shuffler, MicroBatches):
        output = micro.join_values(output, plan)
    if unshuffle := _of(shuffler, Unshuffle):
        numbers = np.flatnonzero(plan.rows.home == dist.get_rank()).tolist()
        return numbers, unshuffle.unshuffle(output, plan)[: len(numbers)]
    return as_computed(shuffler, plan, output)


def _group(batch: Any) -> torch.Tensor:
    """Returns the last digit of the cost, of which several samples have the same."""
    return batch["features"].lengths().view(2, -1).sum(0).long() % 3


def _with(*extensions: Extension, **settings: Any) -> dict[str, Any]:
    return {"extensions": list(extensions), **settings}


TWO, THREE = ((6, 5), (3, 2), (7, 0)), ((2, 2, 2), (1, 1, 0))
RUNS = {
    "micro-batches": [
        *(
            Run(kind, reduction, TWO, settings=_with(MicroBatches(SMALL)))
            for kind, reduction in product(("dict", "base", *WEIGHTED), ("sum", "mean"))
        ),
        *(
            Run(name=name, sharded="table", settings=_with(MicroBatches(SMALL)))
            for name in PIPELINES
            if name not in ("none", "semi_sync")  # which looks tables up before their last update
        ),
        Run("base", name="native", sharded="row", settings=_with(MicroBatches(SMALL))),
        Run("base", sharded="row", settings=_with(MicroBatches(SMALL))),
    ],
    "micro-batches that hold all": [
        Run("base", name=name, sharded="row", settings=_with(MicroBatches(LARGE)))
        for name in ("none", "native")
    ],
    "micro-batches of a rank without samples": [
        Run(kind, reduction, THREE, "native", _with(MicroBatches(SMALL), equal_rows=equal), sharded="table")
        for kind, reduction, equal in product(("dict", "named tuple", "base"), ("sum", "mean"), (True, False))
    ],
    "the way back": [
        Run(kind, rows=TWO, name=name, sharded=sharded, settings=_with(Unshuffle(), *more))
        for kind, sharded in (("dict", "table"), ("base", "row"))
        for name in ("none", "native")
        for more in ((), (MicroBatches(SMALL), Verification()))
    ],
    "groups, verification and learning": [
        Run(rows=TWO, name=name, sharded=sharded, settings=_with(*extensions, equal_rows=False))
        for name, sharded in (("none", ""), ("native", "table"))
        for extensions in (
            (SampleGroups(get_groups=_group),),
            (Verification(),),
            (LearnedCosts(),),
            (SampleGroups(get_groups=_group), LearnedCosts(), Verification(), Unshuffle()),
        )
    ],
    "learning in TorchRec's other pipelines": [
        Run(rows=TWO, name=name, sharded="table", settings=_with(LearnedCosts(), equal_rows=False))
        for name in OTHERS
        if name != "semi_sync"  # which it refuses
    ],
    "padded": [
        *(
            Run(kind, reduction, rows, name, _with(Padded(), equal_rows=False), sharded=sharded)
            for kind, reduction in product(("dict", "torchrec", "base"), ("sum", "mean"))
            for rows, name, sharded in ((TWO, "none", ""), (TWO, "native", "table"))
        ),
        Run(rows=TWO, settings=_with(Padded(), Verification(), Unshuffle(), equal_rows=False)),
    ],
    "padded, with ranks without samples": [
        Run(kind, rows=THREE, name="native", settings=_with(Padded(), equal_rows=False), sharded="table")
        for kind in ("dict", "base")
    ],
    "padded micro-batches": [
        Run(
            kind,
            reduction,
            TWO,
            name,
            _with(Padded(), MicroBatches(SMALL), equal_rows=False),
            sharded=sharded,
        )
        for kind, reduction in product(("dict", "base"), ("sum", "mean"))
        for name, sharded in (("none", ""), ("native", "table"))
    ],
    "nothing moves": [
        Run(rows=TWO, settings=_with(MicroBatches(SMALL), Unshuffle(), Verification(), enabled=False))
    ],
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_a_step_learns_what_one_process_learns(pools, runs):
    of_runs = check_runs(pools(len(runs[0].rows[0])), runs, scores_of)
    for run, results in zip(runs, of_runs, strict=True):
        caps = [one.max_tokens for one in run.settings["extensions"] if isinstance(one, MicroBatches)]
        assert (max(results[0].parts) > 1) == (caps == [SMALL]), run


@on_ranks(2)
def test_a_global_mean_of_micro_batches_is_refused():
    run = Run(reduction="global_mean", settings=_with(MicroBatches(SMALL)))
    assert error_of(trained, run).startswith('ValueError: loss_reduction="global_mean" is for a whole step')


@on_ranks(2)
def test_a_mean_over_none_that_is_not_finite_is_an_error_on_all_ranks():
    check_means_over_none([MicroBatches(max_tokens=100)])
