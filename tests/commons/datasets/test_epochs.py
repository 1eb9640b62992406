"""Each sample is in one batch of one rank per epoch, in an order that goes on where an epoch is resumed."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import SequenceDataset
from tests.commons.datasets.epoch_loaders import (
    MAKERS,
    Numbers,
    buckets,
    expected,
    histories,
    loaded,
    loader_of,
    samples_of,
    sequences,
    steps_of,
)
from tests.commons.distributed.errors_and_warnings import warnings_of

BOTH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
SHAPES = {
    "count": st.integers(0, 60),
    "batch_size": st.integers(1, 5),
    "num_ranks": st.integers(1, 4),
    "epoch": st.integers(0, 3),
}


@st.composite
def drawn_divisions(draw: st.DrawFn) -> dict[str, Any]:
    """Draws which division makes the epochs, and its options."""
    if draw(st.booleans()):
        return {"make": sequences, "shuffle": draw(st.booleans()), "seed": 5}
    num_groups = draw(st.none() | st.integers(1, 20))
    return {"make": buckets, "num_buckets": draw(st.integers(1, 9)), "seed": 5, "num_groups": num_groups}


def divided(count: int, make: Callable, num_groups: int | None = None, **options: Any) -> list:
    if num_groups is not None:  # a few samples have none
        options["groups"] = np.random.default_rng(num_groups).integers(-2, num_groups, count)
    return steps_of(make, count, **options)


@given(**SHAPES, division=drawn_divisions())
def test_every_sample_is_in_exactly_one_batch_of_one_rank(count, batch_size, num_ranks, epoch, division):
    steps = divided(count, batch_size=batch_size, num_ranks=num_ranks, epoch=epoch, **division)
    assert sorted(chain.from_iterable(map(samples_of, steps))) == list(range(count))
    for number, step in enumerate(steps, 1):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) > 0
        assert set(sizes) == {batch_size} or (number == len(steps) and max(sizes) <= batch_size)


@given(**SHAPES, division=drawn_divisions(), where=st.floats(0, 1))
def test_resumed_is_as_uninterrupted(count, batch_size, num_ranks, epoch, division, where):
    options = {"count": count, "epoch": epoch, **division}
    if division["make"] is buckets:  # which resumes on as many ranks, from a step on
        options |= {"batch_size": batch_size, "num_ranks": num_ranks}
        whole = divided(**options)
        start = int(where * len(whole))
        assert divided(**options, start=start) == whole[start:]
    else:
        whole = [sample for (batch,) in divided(**options, batch_size=3, num_ranks=1) for sample in batch]
        start = int(where * count)
        resumed = divided(**options, batch_size=batch_size, num_ranks=num_ranks, start=start)
        assert [sample for step in resumed for batch in step for sample in batch] == whole[start:]


@pytest.mark.parametrize("options", [{}, {"num_buckets": 1}, {"num_buckets": 8}])
def test_epochs_and_seeds_differ_and_repeat(options):
    make = buckets if options else sequences

    def steps(**others):
        return steps_of(make, 50, 4, 2, **options, **others)

    first = steps()
    assert first == steps() and first not in (steps(epoch=1), steps(seed=1))
    division = make(50, 4, 0, 2, **options)
    for _ in range(2):  # it starts at epoch 0 and keeps it until another is set
        assert loaded(division) == [batch for batch, _ in first]
    if make is sequences:
        in_order = steps(shuffle=False, epoch=3)
        assert [sample for step in in_order for batch in step for sample in batch] == list(range(50))


@BOTH
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "forkserver")])
def test_persistent_workers_follow_the_epoch_and_where_it_starts(make, workers, context):
    division = make()
    options = {"persistent_workers": True, "multiprocessing_context": context} if workers else {}
    loader = loader_of(division, num_workers=workers, **options)
    for epoch, start in ((0, 4), (1, 0), (2, 3), (2, 0), (5, 7)):
        division.set_epoch(epoch, start)
        assert len(loader) == len(expected(make, epoch, start))
        assert loaded(loader) == expected(make, epoch, start)


def test_an_iteration_under_way_keeps_its_epoch():
    for make in MAKERS.values():
        division = make()
        batches = iter(division)
        found = [next(batches)]
        division.set_epoch(1)
        assert loaded([*found, *batches]) == expected(make, 0, 0)


@BOTH
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_counts_epochs_does_not_undo_a_start_in_silence(make, num_workers):
    division = make()
    loader = loader_of(division, num_workers=num_workers)
    for given_start in ((3, 4), (0, 4), (3, 0)):
        division.set_epoch(*given_start)
        with pytest.raises(RuntimeError, match=r"set_epoch\(0\) would undo .*iterate over the DataLoader"):
            division.set_epoch(0)  # as accelerate's loaders do before they iterate
        assert loaded(loader) == expected(make, *given_start)
    division.set_epoch(5)  # what was set has been iterated over
    assert loaded(loader) == expected(make, 5, 0)


# Calls of set_epoch, where None stands for an iteration, and the epoch and start that the last one leads to.
CALLS = [
    ([(3, 4), (1, 0)], (1, 0)),
    ([(3,), (1,)], (1, 0)),
    ([(0,), None, (1,), None, (2, 4), None, (3,)], (3, 0)),
    ([None, None, (3, 4), (1,)], (1, 0)),  # no other loader has set an epoch between two iterations
]


@BOTH
@pytest.mark.parametrize(("calls", "found"), CALLS)
def test_calls_that_undo_nothing_follow_any_other(make, calls, found):
    division = make()
    for call in calls:
        loaded(division) if call is None else division.set_epoch(*call)
    assert loaded(division) == expected(make, *found)


@BOTH
def test_only_a_second_iteration_from_within_an_epoch_is_warned_of(make):
    division = make()
    division.set_epoch(77, 4)
    with warnings_of("commons.epoch_start") as messages:
        loaded(division)
        assert messages == []
        loaded(division)
    assert "epoch 77 is iterated over again" in messages[0]


@BOTH
def test_sizes_epochs_and_starts_are_whole_numbers_in_their_range(make):
    division = make()
    start, most = ("start_sample", 32) if make is sequences else ("start_step", 8)
    for call, error, message in (
        (lambda: make(5, batch_size=0), ValueError, "batch_size = 0: expected at least 1"),
        (lambda: make(5, rank=2, num_ranks=2), ValueError, "rank = 2: expected 0 to 1"),
        (lambda: make(5, seed=-1), ValueError, "seed = -1: expected at least 0"),
        (lambda: make(5, num_ranks=1.0), TypeError, "num_ranks = 1.0"),
        (lambda: division.set_epoch(True), TypeError, r"epoch = True \(\w+\): expected an integer"),
        (lambda: division.set_epoch(2**63), ValueError, f"epoch = {2**63}: expected at least 0"),
        (lambda: division.set_epoch(0, 1.5), TypeError, rf"{start} = 1.5 \(\w+\): expected an integer"),
        (lambda: division.set_epoch(0, most + 1), ValueError, f"{start} = {most + 1}: expected 0 to {most}"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert loaded(division) == expected(make, 0, 0)
    division.set_epoch(torch.tensor(2), torch.tensor([4]).numpy()[0])
    assert loaded(division) == expected(make, 2, 4)
    division.set_epoch(2**63 - 1)
    assert len(loaded(division)) == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda of: pickle.loads(pickle.dumps(of))])
def test_a_copy_is_set_by_itself(copied):
    division = sequences()
    division.set_epoch(1)
    other = copied(division)
    loaders = [loader_of(of, num_workers=1, persistent_workers=True) for of in (division, other)]
    for epoch in range(2, 4):
        division.set_epoch(epoch)
        other.set_epoch(epoch + 10)
        for loader, set_epoch in zip(loaders, (epoch, epoch + 10), strict=True):
            assert loaded(loader) == expected(sequences, set_epoch, 0)


def _set_in_another_process(division: SequenceDataset, found: Any) -> None:
    loader = loader_of(division, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    first = loaded(loader)
    division.set_epoch(1)
    found.put([first, loaded(loader)])


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # a copy of memory, and one by pickle
def test_a_dataset_of_another_process_reaches_its_workers(method):
    context = multiprocessing.get_context(method)
    division, found = sequences(), context.Queue()
    process = context.Process(target=_set_in_another_process, args=(division, found))
    process.start()
    assert found.get(timeout=120) == [expected(sequences, epoch, 0) for epoch in range(2)]
    process.join()


@pytest.mark.parametrize("count", [31, 33])
def test_a_source_that_grows_or_shrinks_is_an_error(count):
    source = Numbers(32)
    dataset = SequenceDataset(source, 4)
    source.count = count
    for use in (len, loaded, lambda dataset: dataset.set_epoch(1)):
        with pytest.raises(RuntimeError, match=f"has {count} samples, expected 32.*make another"):
            use(dataset)


def test_one_bucket_has_the_steps_of_a_shuffled_dataset():
    for count in (0, 3, 96, 100):
        options = {"count": count, "batch_size": 4, "num_ranks": 3, "epoch": 2, "seed": 7}
        plain = steps_of(sequences, **options)
        bucketed = steps_of(buckets, **options, workloads=histories(count), num_buckets=1)
        assert list(map(samples_of, bucketed)) == list(map(samples_of, plain))
