"""Epochs over one iterator object, as a DataLoader with persistent workers gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from commons.pipeline import ShuffleStageMixin
from tests.commons.histories import HistoryBatch, TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of, sharded_ranking_model, steps_of
from tests.on_ranks import on_ranks

ROWS = 3


class Drawn(Dataset):
    """Batches, the same in every process."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> HistoryBatch:
        return draw_histories(np.random.default_rng(index), ROWS)


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


def persistent(count: int) -> DataLoader:
    return DataLoader(Drawn(count), batch_size=None, num_workers=1, persistent_workers=True)


def made(name: str, model, optimizer):
    if name == "derived":
        return Derived(model, optimizer, CPU, TokenShuffler(), "sum")
    return pipeline_of(name, model, optimizer, TokenShuffler())


@on_ranks(2)
def test_each_epoch_of_persistent_workers_trains_and_evaluates_on_every_batch():
    model, optimizer = sharded_ranking_model()
    counts = (5, 2)[dist.get_rank()], (1, 3)[dist.get_rank()]
    loaders = [persistent(count) for count in counts]
    iterators = [iter(loader) for loader in loaders]
    for name in ("none", "native", "derived"):
        training, evaluation = made(name, model, optimizer), made(name, model, optimizer)
        for _ in range(3):
            for pipeline, loader, iterator, steps, trains in zip(
                (training, evaluation), loaders, iterators, (5, 3), (True, False), strict=True
            ):
                model.train(trains)
                assert iter(loader) is iterator
                assert len(list(steps_of(pipeline, loader))) == steps
        for pipeline in (training, evaluation):
            if name != "none":
                pipeline.detach()


class Persistent:
    """Gives its batches again once `iter` was called, as the iterator of persistent workers does."""

    def __init__(self, count: int) -> None:
        self._data = Drawn(count)

    def __iter__(self):
        self._left = iter(range(len(self._data)))
        return self

    def __next__(self) -> HistoryBatch:
        return self._data[next(self._left)]


@pytest.mark.parametrize("name", ["none", "native", "derived"])
@on_ranks(2)
def test_after_a_reset_within_an_epoch_later_ones_train_on_every_batch(name):
    pipeline, loader = made(name, *sharded_ranking_model()), Persistent((8, 4)[dist.get_rank()])
    batches, samples = iter(loader), []
    for _ in range(6):
        pipeline.progress(batches)
    pipeline.reset()
    for _ in range(2):
        tokens = [loss_tokens for _, loss_tokens, _ in steps_of(pipeline, loader)]
        samples.append((len(tokens), sum(tokens)))
    every = [Drawn(8)[index].num_loss_tokens().sum().item() for index in range(8)]
    assert samples == [(8, sum(every) + sum(every[:4]))] * 2


@on_ranks(2)
def test_a_shuffler_plans_for_others_after_each_epoch_and_for_none_before():
    model, optimizer = sharded_ranking_model()
    shuffler, batch = TokenShuffler(), Drawn(1)[0]
    pipeline = pipeline_of("none", model, optimizer, shuffler)
    for _ in range(30):
        assert len([*steps_of(pipeline, [batch])]) == 1
        assert shuffler.plan(batch).has_batch
    pipeline.progress(iter([batch] * 3))
    with pytest.raises(RuntimeError, match=r"plans for a pipeline.*create another shuffler"):
        pipeline_of("none", model, optimizer, shuffler)
    pipeline.reset()


@pytest.mark.parametrize("name", ["none", "native", "derived"])
@on_ranks(2)
def test_an_ended_loader_is_not_asked_again_while_its_steps_run(name):
    pipeline, asked = made(name, *sharded_ranking_model()), 0

    class Counting:
        def __next__(self):
            nonlocal asked
            asked += 1
            if asked > 4:
                raise StopIteration
            return draw_histories(np.random.default_rng(asked), ROWS)

    loader = Counting()
    for _ in range(4):
        pipeline.progress(loader)
    assert asked <= 5
    with pytest.raises(StopIteration):
        pipeline.progress(loader)
    assert asked == 5
