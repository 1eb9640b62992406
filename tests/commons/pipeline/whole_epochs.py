"""Epochs of ranks that load different numbers of batches, and a check that no sample is lost or doubled."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch.distributed as dist

from commons.distributed import BatchShuffler, IdentityShuffler
from tests.commons.histories import TokenShuffler, contents, draw_histories, num_tokens
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model, steps_of

ROWS = 3


class _SquaredTokens(IdentityShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens() ** 2


@dataclass(frozen=True)
class Loading:
    """How many batches each rank loads in each epoch, and the ranks that balance together."""

    epochs: tuple[tuple[int, ...], ...]
    groups: Sequence[Sequence[int]] | None = None

    def shuffler(self, **settings: Any) -> BatchShuffler:
        """Makes this rank's shuffler; one for groups of one rank is the identity."""
        if self.groups is None:
            return TokenShuffler(**settings)
        made = [dist.new_group(ranks) for ranks in self.groups]
        if all(len(ranks) == 1 for ranks in self.groups):
            return _SquaredTokens(**settings)
        (mine,) = (group for group in made if dist.get_rank(group) >= 0)
        return TokenShuffler(mine, **settings)


LOADINGS = {
    "two ranks": Loading(((5, 5), (6, 3), (4, 0))),
    "three ranks": Loading(((4, 1, 0), (2, 0, 3))),
    "pairs": Loading(((4, 2, 1, 1), (0, 4, 0, 0)), groups=[[0, 1], [2, 3]]),
    "one alone": Loading(((2, 4, 3), (0, 3, 1)), groups=[[0, 2], [1]]),
    "identity": Loading(((4, 2), (0, 3)), groups=[[0], [1]]),
}


@dataclass(frozen=True)
class Step:
    """A step on one rank: samples of each call of the model, rows, loss tokens of all ranks, and loads."""

    calls: list[list[tuple]]
    rows: int
    loss_tokens: int
    num_samples: int
    loads: list[float]


def epochs(name: str, loading: Loading, every_settings: list[dict[str, Any]]) -> list[tuple]:
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
                assert len(computed) == (len(outputs) if isinstance(outputs, list) else 1)
                steps.append(
                    Step(
                        calls=list(map(contents, computed)),
                        rows=sum(batch.batch_size for batch in computed),
                        loss_tokens=loss_tokens,
                        num_samples=pipeline.num_samples,
                        loads=pipeline.report.job_loads_after.tolist(),
                    )
                )
                computed.clear()
            results.append(([content for batch in batches for content in contents(batch)], steps))
    return results


def check_epochs(results: list[list[tuple]], loading: Loading, every_settings: list, pads: bool) -> None:
    """Checks that every sample is computed once, and that all ranks know all loads."""
    runs = product(every_settings, loading.epochs)
    for (settings, num_batches), *of_ranks in zip(runs, *results, strict=True):
        _check_epoch(of_ranks, max(num_batches))
        if pads and loading.groups is None and settings.get("equal_rows", True):
            for step in zip(*(steps for _, steps in of_ranks), strict=True):
                assert len({of_rank.rows for of_rank in step}) == 1


def _check_epoch(of_ranks: list[tuple], num_steps: int) -> None:
    loaded = Counter(sample for of_rank, _ in of_ranks for sample in of_rank)
    assert loaded == Counter(
        sample for _, steps in of_ranks for step in steps for one in step.calls for sample in one
    )
    assert [len(steps) for _, steps in of_ranks] == [num_steps] * len(of_ranks)
    for step in zip(*(steps for _, steps in of_ranks), strict=True):
        samples = [[sample for one in of_rank.calls for sample in one] for of_rank in step]
        # Every rank has the loads of all, and as many calls.
        loads = [sum(num_tokens(sample) ** 2 for sample in of_rank) for of_rank in samples]
        labels = sum(len(sample[-1]) for of_rank in samples for sample in of_rank)
        for of_rank, mine in zip(step, samples, strict=True):
            assert (of_rank.loads, of_rank.loss_tokens) == (loads, labels)
            assert of_rank.num_samples == len(mine)
            assert len(of_rank.calls) == len(step[0].calls)
