"""What is used again, by whomever, loses, repeats and mixes up no sample on any rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets import BucketSampler
from commons.datasets.sequence_dataset import SequenceDataset
from commons.distributed import BatchShuffler, ShufflePlan
from commons.extensions.unshuffle import Unshuffle
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.histories import TokenShuffler, contents, draw_histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of, sharded_ranking_model, steps_of
from tests.on_ranks import on_ranks

Batch = dict[str, torch.Tensor]
ROWS = 3


class Rows(Dataset):
    """Numbers of samples, which also are their costs."""

    def __init__(self, first: int, count: int) -> None:
        self._numbers = range(first, first + count)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Batch:
        return {"sample": torch.tensor(self._numbers[index])}


class SampleShuffler(BatchShuffler):
    """A sample costs its number, and the rows of ranks follow the load."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(equal_rows=False, **settings)

    def get_workloads(self, batch: Batch) -> torch.Tensor:
        return batch["sample"]


class Weighted(torch.nn.Module):
    """Returns the samples that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch["sample"] * self.weight, batch["sample"]


def batch_of(*samples: int) -> Batch:
    return {"sample": torch.tensor(samples)}


def of_all_ranks(value: Any) -> list[Any]:
    """Gathers; a rank that does not come is an error."""
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def refusal_of(function: Callable[[], Any], *kinds: type[Exception]) -> str:
    """Returns the message with which a call is refused; empty if it is not."""
    try:
        function()
    except (TypeError, ValueError, *kinds) as error:
        return str(error)
    return ""


def placed(shuffler: BatchShuffler, batch: Batch, plan: ShufflePlan) -> list[int]:
    """Exchanges a batch; returns the samples that this rank computes."""
    samples = shuffler.exchange(batch, plan)["sample"]
    shuffler.scale(torch.zeros(()), plan, None)
    return samples[: plan.num_placed[shuffler.group.rank]].tolist()


def computed(shuffler: BatchShuffler, batches: Iterable[Batch]) -> list[list[int]]:
    """Returns the samples that this rank computes in each step of a loop."""
    return [placed(shuffler, batch, plan) for batch, plan in shuffler.plan_ahead(batches)]


def check_once(steps: list[list[int]], loaded: list[int]) -> None:
    """Checks that all ranks made as many steps, and computed each of their samples once."""
    ranks = of_all_ranks((steps, loaded))
    assert len({len(of_rank) for of_rank, _ in ranks}) == 1
    found = Counter(sample for of_rank, _ in ranks for step in of_rank for sample in step)
    assert found == Counter(sample for _, of_rank in ranks for sample in of_rank)


def with_workers(dataset: Dataset, **more: Any) -> DataLoader:
    """Makes a loader whose worker lives on, and whose iterator is the same in each epoch."""
    return DataLoader(dataset, num_workers=1, persistent_workers=True, **more)


@pytest.mark.parametrize("resets", [False, True])
@on_ranks(2)
def test_persistent_workers_feed_every_epoch(resets):
    rank = dist.get_rank()
    loader = with_workers(Rows(100 * rank, 8 + 4 * rank), batch_size=4)
    model = Weighted()
    pipeline = pipeline_of("none", model, torch.optim.SGD(model.parameters(), 0.1), SampleShuffler())
    for _ in range(3):
        steps: list[list[int]] = []

        def epoch(steps=steps):
            for *_, output in steps_of(pipeline, loader):
                steps.append(output[: pipeline.num_samples].tolist())
            if resets:
                pipeline.reset()

        if any(refusals := of_all_ranks(refusal_of(epoch))):
            assert all(refusals)
            return
        check_once(steps, [100 * rank + number for number in range(8 + 4 * rank)])


@on_ranks(2)
def test_a_loop_goes_on_where_another_left_the_iterator():
    shuffler, first = SampleShuffler(), 100 * dist.get_rank()
    batches = iter([batch_of(first + 2 * number, first + 2 * number + 1) for number in range(6)])
    steps: list[list[int]] = []

    def epoch_in_parts():
        for _ in range(3):
            part = shuffler.plan_ahead(batches)
            steps.extend(placed(shuffler, batch, plan) for batch, plan in itertools.islice(part, 2))
            part.close()

    if any(refusals := of_all_ranks(refusal_of(epoch_in_parts))):
        assert all(refusals)
        return
    check_once(steps, list(range(first, first + 12)))


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_loaders_that_take_turns_lose_no_sample(name):
    model, optimizer = sharded_ranking_model()
    seen: list[Any] = []
    model.module.dense.register_forward_pre_hook(lambda module, args: seen.append(contents(args[1])))
    pipeline = pipeline_of(name, model, optimizer, TokenShuffler())
    rng, rank = np.random.default_rng(dist.get_rank()), dist.get_rank()
    tasks = [[draw_histories(rng, ROWS) for _ in range(count)] for count in ((5, 2), (1, 4))[rank]]
    left = [iter(task) for task in tasks]
    while left:
        for loader in list(left):
            try:
                pipeline.progress(loader)
            except StopIteration:
                left.remove(loader)
    check_once(seen, [sample for task in tasks for batch in task for sample in contents(batch)])


@on_ranks(2)
def test_a_kept_error_of_a_loop_lets_all_ranks_loop_again_or_none():
    shuffler, first, kept = SampleShuffler(), 100 * dist.get_rank(), []
    batches = [batch_of(first + 2 * number, first + 2 * number + 1) for number in range(4)]

    def fails() -> None:
        planned = shuffler.plan_ahead(batches)
        while step := list(itertools.islice(planned, 1)):
            raise OSError(f"out of memory after {len(step)} step")

    try:
        fails()
    except OSError as error:
        if dist.get_rank() == 0:
            kept.append(error)  # to be logged
    steps: list[list[int]] = []
    refusals = of_all_ranks(refusal_of(lambda: steps.extend(computed(shuffler, batches)), RuntimeError))
    assert all(refusals) or not any(refusals)
    if any(refusals):
        assert "another shuffler" in refusals[0]
        steps = computed(SampleShuffler(), batches)
    check_once(steps, list(range(first, first + 8)))


@on_ranks(2)
def test_a_refused_evaluation_does_not_open_the_shuffler_of_a_loop():
    shuffler, first = SampleShuffler(), 100 * dist.get_rank()
    batches = [batch_of(first + 2 * number, first + 2 * number + 1) for number in range(4)]
    steps = []
    for batch, plan in shuffler.plan_ahead(batches):
        if len(steps) < 3:
            assert "create another shuffler" in refusal_of(lambda: computed(shuffler, batches), RuntimeError)
            assert "create another shuffler" in refusal_of(lambda: shuffler.plan(batch_of(1)), RuntimeError)
        steps.append(placed(shuffler, batch, plan))
    check_once(steps, list(range(first, first + 8)))


@on_ranks(2)
def test_a_second_iteration_from_within_an_epoch_is_warned_of():
    rank, costs = dist.get_rank(), np.arange(32)
    sampler = BucketSampler(costs, 4, rank, 2)
    sampler.set_epoch(2)
    whole = list(sampler)
    sampler.set_epoch(2, start_step=3)
    loader = DataLoader(Rows(0, 32), batch_sampler=sampler)
    with warnings_of("commons.datasets.epoch_start") as records:
        resumed, after = ([batch["sample"].tolist() for batch in loader] for _ in range(2))
    assert resumed == after == whole[3:]
    assert len(records) == 1 and "epoch 2 is iterated over again from start_step=3 on" in records[0]


class Numbers:
    """A source of samples, which are numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: list[int], batch_size: int) -> Batch:
        return batch_of(*samples)


@on_ranks(2)
def test_workers_that_live_on_learn_of_the_next_epoch():
    rank = dist.get_rank()
    dataset, alone = (SequenceDataset(Numbers(), 4, rank, 2, shuffle=True) for _ in range(2))
    loader = with_workers(dataset, batch_size=None)
    for epoch in range(3):
        for of in (dataset, alone):
            of.set_epoch(epoch, 8 * (epoch == 0))
        loaded: list[list[int]] = []

        def load(loaded=loaded):
            loaded.extend(batch["sample"].tolist() for batch in loader)

        if any(refusals := of_all_ranks(refusal_of(load))):
            assert all(refusals)
            return
        assert loaded == [batch["sample"].tolist() for batch in alone]


class Annealed(SampleShuffler):
    shared_fields = ("temperature",)


@on_ranks(2)
def test_a_rank_that_has_ended_computes_with_what_the_step_shares():
    shuffler, rank = Annealed(), dist.get_rank()
    batches = [
        batch_of(*range(10 * number + 1, 10 * number + 5)) | {"temperature": torch.tensor(float(number))}
        for number in range((4, 1)[rank])
    ]
    found = []

    def epoch():
        for batch, plan in shuffler.plan_ahead(batches):
            exchanged = shuffler.exchange(batch, plan)
            shuffler.scale(torch.zeros(()), plan, None)
            samples = exchanged["sample"][: plan.num_placed[rank]].tolist()
            found.append([(sample, float(exchanged["temperature"])) for sample in samples])

    if any(refusals := of_all_ranks(refusal_of(epoch))):
        assert all(refusals)
        return
    assert len(found) == 4 and all(found)
    assert all(temperature == sample // 10 for step in found for sample, temperature in step)


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("of", ["fields", "keys"])
@on_ranks(2)
def test_names_in_another_order_on_a_rank_mix_up_no_fields(of, first_step):
    shuffler, rank, exchanged = SampleShuffler(), dist.get_rank(), []

    def batch(number: int) -> dict[str, Any]:
        samples, names, keys = torch.arange(3) + 100 * rank + 10 * number, ["clicks", "views", "ids"], "xy"
        if rank == 1 and number >= first_step:  # as from a set of strings, whose hashes differ
            names, keys = (names[::-1], keys) if of == "fields" else (names, keys[::-1])
        ones = torch.ones(6, dtype=torch.int64)
        ids = torch.cat([samples + 1000 * ("xy".index(key) + 1) for key in keys])
        columns = {
            "clicks": samples + 3000,
            "views": JaggedTensor(samples + 4000, lengths=ones[:3]),
            "ids": KeyedJaggedTensor(list(keys), ids, lengths=ones),
        }
        return {name: columns[name] for name in names} | {"sample": samples}

    def epoch() -> None:
        for loaded, plan in shuffler.plan_ahead(map(batch, range(4))):
            exchanged.append(shuffler.exchange(loaded, plan))
            shuffler.scale(torch.zeros(()), plan, None)

    refusals = of_all_ranks(refusal_of(epoch))
    assert all(refusals) or not any(refusals)
    for now in exchanged:
        samples, ids = now["sample"], now["ids"]
        assert now["clicks"].equal(samples + 3000)
        assert now["views"].values().equal(samples + 4000)
        assert ids["x"].values().equal(samples + 1000) and ids["y"].values().equal(samples + 2000)
    if not any(refusals):
        loaded = [100 * rank + 10 * number + row for number in range(4) for row in range(3)]
        check_once([now["sample"].tolist() for now in exchanged], loaded)


@on_ranks(2)
def test_each_loaded_sample_gets_one_result_however_late():
    unshuffle, rank = Unshuffle(), dist.get_rank()
    shuffler, steps = SampleShuffler(extensions=[unshuffle]), []
    first, num_batches = 100 * rank + 1, (4, 2)[rank]
    batches = [
        batch_of(*range(first + 10 * number, first + 10 * number + 3)) for number in range(num_batches)
    ]
    with torch.no_grad():
        for batch, plan in shuffler.plan_ahead(batches):
            steps.append((2 * shuffler.exchange(batch, plan)["sample"], plan))
    returned = [unshuffle.unshuffle(doubled, plan).tolist() for doubled, plan in reversed(steps)]
    results = [result for of_step in reversed(returned) for result in of_step]
    assert results == [2 * int(sample) for batch in batches for sample in batch["sample"]]


class Costly(BatchShuffler):
    """The workload is an entry of the batch."""

    def get_workloads(self, batch):
        return batch["cost"]


def numbered(first: int, count: int) -> list[dict[str, torch.Tensor]]:
    cost = torch.tensor([[5, 4, 1, 2], [1, 2, 3, 4]][dist.get_rank()])
    return [{"id": torch.arange(4) + 10 * (first + step), "cost": cost} for step in range(count)]


def ids_of(shuffler: BatchShuffler, batches: Any, steps: int = 99) -> list[list[int]]:
    ids = []
    for batch, plan in shuffler.plan_ahead(batches):
        with torch.no_grad():
            ids.append(shuffler.exchange(batch, plan)["id"].tolist())
        if len(ids) == steps:
            break
    return ids


def _collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return rows[0]


@pytest.mark.parametrize("between", ["nothing", "an evaluation", "another shuffler"])
@pytest.mark.parametrize("loader", ["list", "generator", "data loader"])
@on_ranks(2)
def test_going_on_with_an_iterator_of_a_loop_that_was_left_is_refused(between, loader):
    shuffler, batches = Costly(), numbered(0, 5)
    if loader == "data loader":
        batches = torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=_collated)
    iterator = (batch for batch in batches) if loader == "generator" else iter(batches)
    assert len(ids_of(shuffler, iterator, 2)) == 2
    if between == "an evaluation":
        ids_of(shuffler, numbered(50, 1))
    elif between == "another shuffler":
        shuffler = Costly()
    with pytest.raises(ValueError, match="gave a batch to an earlier loop"):
        ids_of(shuffler, iterator)


@on_ranks(2)
def test_persistent_workers_start_anew_after_a_loop_that_was_left():
    shuffler, loader = Costly(), with_workers(numbered(0, 4), batch_size=1, collate_fn=_collated)
    assert len(ids_of(shuffler, loader, 2)) == 2
    assert len(ids_of(shuffler, loader)) == 4


class Restarting:
    """A loader that starts anew by `iter`, and is its own iterator."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self._place = batches, 0

    def __iter__(self) -> Restarting:
        self._place = 0
        return self

    def __next__(self) -> Any:
        if self._place == len(self._batches):
            raise StopIteration
        self._place += 1
        return self._batches[self._place - 1]


@on_ranks(2)
def test_a_loader_that_starts_anew_may_be_left_with_an_evaluation_in_between():
    shuffler, loader = Costly(), Restarting(numbered(0, 4))
    for _ in range(3):
        assert len(ids_of(shuffler, loader, 2)) == 2
        ids_of(shuffler, numbered(50, 1))
