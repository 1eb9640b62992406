"""Loaders, and what a loop does with them: each sample once, and all ranks stop in the same call."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from commons.pipeline import ShuffleStageMixin
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.histories import HistoryBatch, TokenShuffler, contents, histories
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    OTHERS,
    PIPELINES,
    loaded_histories,
    pipeline_of,
    sharded_ranking_model,
    steps_of,
)
from tests.on_ranks import on_ranks

Steps = Iterable[list[tuple]]  # samples that this rank computes in each step


class ReadsAhead(TrainPipelineSparseDist):
    """Has a way of its own to read the next batch, with TorchRec's notes of the loader."""

    def _next_batch(self, dataloader_iter):
        if dataloader_iter is not self._dataloader_iter:
            self._dataloader_iter, self._dataloader_exhausted = dataloader_iter, False
        batch = None if self._dataloader_exhausted else next(dataloader_iter, None)
        self._dataloader_exhausted = batch is None
        return batch


class Derived(ShuffleStageMixin, ReadsAhead):
    pass


class Restarting:
    """A loader that starts anew by `iter`, and is its own iterator; counts how often it is asked."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self.asked = batches, 0

    def __iter__(self) -> Restarting:
        self.asked = 0
        return self

    def __next__(self) -> Any:
        self.asked += 1
        if self.asked > len(self._batches):
            raise StopIteration
        return self._batches[self.asked - 1]


LOADERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "restarting": Restarting,
    # Its worker lives on, and its iterator is the same in each epoch.
    "persistent workers": partial(DataLoader, batch_size=None, num_workers=1, persistent_workers=True),
}


class Loop:
    """A loop over `plan_ahead`, or a pipeline, whose steps say which samples this rank computes."""

    def __init__(self, name: str, model: Any, optimizer: Any) -> None:
        self.shuffler, self._computed = TokenShuffler(), []
        model.module.dense.register_forward_pre_hook(lambda module, args: self._computed.append(args[1]))
        if name == "derived":
            self.pipeline = Derived(model, optimizer, CPU, self.shuffler, "sum")
        elif name != "plan_ahead":
            self.pipeline = pipeline_of(name, model, optimizer, self.shuffler)
        else:
            self.pipeline = None

    def steps(self, loader: Iterable[HistoryBatch]) -> Iterator[list[tuple]]:
        if self.pipeline is not None:
            return (contents(self._computed[-1]) for _ in steps_of(self.pipeline, loader))
        planned = self.shuffler.plan_ahead(loader)
        return (self._exchanged(*step) for step in planned)

    def _exchanged(self, batch: HistoryBatch, plan: Any) -> list[tuple]:
        moved = self.shuffler.exchange(batch, plan)
        self.shuffler.scale(torch.zeros(()), plan, None)
        return contents(moved)

    def leave(self) -> None:
        if self.pipeline is not None:
            self.pipeline.reset()


def check_once(steps: Steps, loaded: Iterable[HistoryBatch]) -> None:
    """Checks that all ranks make as many steps, and compute each of their samples once."""
    mine = (list(steps), [contents(batch) for batch in loaded])
    dist.monitored_barrier(timeout=timedelta(seconds=20))  # a rank that does not come is an error
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    assert len({len(computed) for computed, _ in ranks}) == 1
    computed, expected = (
        Counter(sample for of_rank in ranks for batch in of_rank[part] for sample in batch) for part in (0, 1)
    )
    assert computed == expected and len(expected) > 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["plan_ahead", "native"], LOADERS),
        *itertools.product(["none", "derived", *OTHERS], ["restarting"]),
    ],
)
@on_ranks(2)
def test_each_epoch_has_each_sample_once_even_if_the_last_was_left(name, kind):
    model, optimizer = sharded_ranking_model()
    training, evaluation = Loop(name, model, optimizer), Loop(name, model, optimizer)
    rank = dist.get_rank()
    batches, others = loaded_histories((5, 2)[rank]), loaded_histories((1, 3)[rank], seed=1)
    loader, other = LOADERS[kind](batches), LOADERS[kind](others)
    for left_after in (3, None, 4, None):
        model.train()
        steps = training.steps(loader)
        if left_after:  # when the loader of rank 1 has ended, or, as a pipeline reads ahead, all have
            assert len([*itertools.islice(steps, left_after)]) == left_after
            del steps
            training.leave()
        else:
            check_once(steps, batches)
            assert training.shuffler.plan(batches[0]).has_batch  # which plans for none between epochs
            assert kind != "restarting" or loader.asked == len(batches) + 1  # some hang if asked again
        model.eval()
        check_once(evaluation.steps(other), others)


@pytest.mark.parametrize("name", [*PIPELINES, "derived"])
@on_ranks(2)
def test_loaders_that_take_turns_lose_no_sample(name):
    loop = Loop(name, *sharded_ranking_model())
    batches = [loaded_histories(count, seed) for seed, count in enumerate(((5, 2), (1, 4))[dist.get_rank()])]
    left, computed = [iter(of_task) for of_task in batches], []
    while left:
        for loader in list(left):
            try:
                loop.pipeline.progress(loader)
            except StopIteration:
                left.remove(loader)
            else:
                computed.append(contents(loop._computed[-1]))
    check_once(computed, itertools.chain(*batches))


@on_ranks(2)
def test_an_error_that_one_rank_keeps_refuses_the_shuffler_on_all():
    shuffler, kept = TokenShuffler(), []

    def fails() -> None:
        planned = shuffler.plan_ahead(loaded_histories(4))
        raise OSError(f"out of memory after step {next(planned)}")

    try:
        fails()
    except OSError as error:
        if dist.get_rank() == 0:
            kept.append(error)  # to be logged; its traceback holds the loop
    with pytest.raises(RuntimeError, match="create another shuffler"):
        next(shuffler.plan_ahead(loaded_histories(4)))
    assert len([*TokenShuffler().plan_ahead(loaded_histories(4))]) == 4


class Files:
    """A loader that fails at some batches of rank 1, and goes on with the next; or leaves these out."""

    def __init__(self, count: int, failing: set[int], left_out: bool = False) -> None:
        self._numbers, self._failing, self._left_out = iter(range(count)), failing, left_out

    def __iter__(self) -> Files:
        return self

    def __next__(self) -> HistoryBatch:
        number = next(self._numbers)
        if number in self._failing:
            if self._left_out:
                return next(self)
            if dist.get_rank() == 1:
                raise OSError(f"file {number} cannot be read")
        return histories([1 + (number * (1 + dist.get_rank())) % 13] * 2)


def _train_on(name: str, loader: Files, given: dict[str, Any]) -> tuple[list[tuple[float, int]], list[str]]:
    """Returns the loss and the loss tokens of each step, and the errors on the way."""
    pipeline = pipeline_of(name, *sharded_ranking_model(), TokenShuffler(), **given)
    steps, errors = [], []
    while True:
        try:
            pipeline.progress(loader)
            steps.append((float(pipeline.loss_sum), pipeline.loss_tokens))
        except StopIteration:
            return steps, errors
        except OSError as error:
            errors.append(str(error))


@pytest.mark.parametrize(
    ("name", "given"),
    [*((name, {}) for name in PIPELINES), ("native", {"enqueue_batch_after_forward": True})],
)
@pytest.mark.parametrize("failing", [{0, 2, 3, 8, 11}, {1, 2, 6, 7}])
@on_ranks(2)
def test_a_loader_that_fails_and_goes_on_loses_the_failed_step_alone(name, given, failing):
    steps, errors = _train_on(name, Files(12, failing), given)
    assert errors == [f"file {number} cannot be read" for number in sorted(failing)]
    assert steps == _train_on(name, Files(12, failing, left_out=True), given)[0]


@on_ranks(2)
def test_reset_drops_an_error_that_the_next_step_would_raise():
    pipeline, loader = pipeline_of("native", *sharded_ranking_model(), TokenShuffler()), Files(12, {3})
    for _ in range(2):
        pipeline.progress(loader)
    with warnings_of("commons.pipeline.shuffle_stage") as messages:
        pipeline.reset()
    assert len(messages) == 1 and "file 3 cannot be read" in messages[0]
    assert len(list(steps_of(pipeline, Files(4, set())))) == 4
