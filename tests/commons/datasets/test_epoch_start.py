"""Which epoch an iteration has, and where it starts, in the loaders of torch and of those who wrap them."""

import copy
import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from commons.datasets import BucketSampler, SequenceDataset
from tests.commons.distributed.errors_and_warnings import warnings_of

SAMPLES = range(32)


class Numbers:
    """Samples are numbers, and a batch is a tensor of them."""

    def __init__(self, count: int = len(SAMPLES)) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: list[int], batch_size: int) -> torch.Tensor:
        return torch.tensor(samples)


class CountingLoader:
    """A loader that counts epochs by itself, as those that accelerate has prepared in one process."""

    def __init__(self, loader: DataLoader, sets_epoch: Callable[[int], None]) -> None:
        self._loader, self._sets_epoch, self._counter = loader, sets_epoch, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._sets_epoch(self._counter)
        yield from self._loader
        self._counter += 1


def sequences(**options: Any) -> tuple[SequenceDataset, DataLoader]:
    dataset = SequenceDataset(Numbers(), 4, shuffle=True)
    return dataset, DataLoader(dataset, batch_size=None, **options)


def buckets(**options: Any) -> tuple[BucketSampler, DataLoader]:
    sampler = BucketSampler(list(SAMPLES), 4)
    return sampler, DataLoader(SAMPLES, batch_sampler=sampler, **options)


MAKERS = pytest.mark.parametrize("make", [sequences, buckets])


def loaded(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def expected(make: Any, epoch: int, start: int) -> list[list[int]]:
    """Returns the batches of an epoch that was set explicitly."""
    of, loader = make()
    of.set_epoch(epoch, start)
    return loaded(loader)


@MAKERS
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("given", [(3, 4), (0, 4), (3, 0)])
def test_a_loader_that_counts_epochs_does_not_undo_a_start_in_silence(make, given, num_workers):
    of, loader = make(num_workers=num_workers)
    counting = CountingLoader(loader, of.set_epoch)
    of.set_epoch(*given)
    with pytest.raises(RuntimeError, match=r"set_epoch\(0\) would undo set_epoch\(.*iterate over the DataL"):
        loaded(counting)
    assert loaded(loader) == expected(make, *given)
    of.set_epoch(5)  # what was set has been iterated over
    assert loaded(loader) == expected(make, 5, 0)


@MAKERS
def test_a_loader_that_counts_epochs_does_not_undo_a_start_between_its_iterations(make):
    of, loader = make()
    counting = CountingLoader(loader, of.set_epoch)
    for epoch in range(3):
        assert loaded(counting) == expected(make, epoch, 0)
    of.set_epoch(1, 4)
    with pytest.raises(RuntimeError, match=r"set_epoch\(3\) would undo set_epoch\(1, "):
        loaded(counting)


@MAKERS
def test_calls_that_undo_nothing_or_say_so_follow_any_other(make):
    of, loader = make()
    of.set_epoch(0, 0)
    assert loaded(CountingLoader(loader, of.set_epoch)) == expected(make, 0, 0)
    for calls in (((3, 4), (1, 0)), ((3, 4), (2, 4), (1, 0)), ((3,), (1,)), ((1, 0), (1,))):
        of, loader = make()
        for call in calls:
            of.set_epoch(*call)
        assert loaded(loader) == expected(make, 1, 0)
    of, loader = make()
    assert loaded(loader) == loaded(loader)  # no other loader has set an epoch between
    of.set_epoch(3, 4)
    of.set_epoch(1)
    assert loaded(loader) == expected(make, 1, 0)


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 2), ("spawn", 1), ("forkserver", 2)])
def test_a_start_that_persistent_workers_have_begun_at_may_be_followed(context, num_workers):
    options = {"persistent_workers": True, "multiprocessing_context": context}
    dataset, loader = sequences(num_workers=num_workers, **options)
    for epoch in range(3):
        dataset.set_epoch(epoch, 8)
        assert loaded(loader) == expected(sequences, epoch, 8)
        dataset.set_epoch(epoch)
        assert loaded(loader) == expected(sequences, epoch, 0)


@MAKERS
@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_a_second_iteration_from_within_an_epoch_is_warned_of(make, num_workers):
    of, loader = make(num_workers=num_workers)
    of.set_epoch(7 + num_workers, 4)
    with warnings_of("commons.datasets.epoch_start") as records:
        loaded(loader)
    assert records == []


@MAKERS
def test_what_is_no_whole_number_is_refused(make):
    of, loader = make()
    start_name = "start_sample" if make is sequences else "start_step"
    for value in (1.5, 1.0, "1", True, None):
        with pytest.raises(TypeError, match=rf"epoch = {value!r} \(\w+\): expected an integer"):
            of.set_epoch(value)
    for value in (1.5, 0.0, False, "0"):
        with pytest.raises(TypeError, match=rf"{start_name} = {value!r} \(\w+\): expected an integer"):
            of.set_epoch(0, value)
    with pytest.raises(ValueError, match="epoch = 9223372036854775808: expected at least 0 and below 2"):
        of.set_epoch(2**63)
    with pytest.raises(ValueError, match=f"{start_name} = -1: expected 0 to "):
        of.set_epoch(0, -1)
    assert loaded(loader) == expected(make, 0, 0)
    of.set_epoch(torch.tensor(2), torch.tensor([4]).numpy()[0])
    assert loaded(loader) == expected(make, 2, 4)
    of.set_epoch(2**63 - 1)
    assert len(loaded(loader)) == 8


@pytest.mark.parametrize("value", [1.5, 2.0, True, "1"])
def test_sizes_and_ranks_are_whole_numbers(value):
    for name in ("batch_size", "rank", "num_ranks", "seed"):
        arguments = {"batch_size": 4, "rank": 0, "num_ranks": 2, "seed": 0} | {name: value}
        for make, samples in ((SequenceDataset, Numbers()), (BucketSampler, list(SAMPLES))):
            with pytest.raises(TypeError, match=f"{name} = {value!r}"):
                make(samples, **arguments)
    with pytest.raises(ValueError, match="num_buckets is"):
        BucketSampler(list(SAMPLES), 4, num_buckets=value)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda of: pickle.loads(pickle.dumps(of))])
def test_a_copy_is_set_by_itself(copied):
    options = {"batch_size": None, "num_workers": 1, "persistent_workers": True}
    dataset, _ = sequences()
    dataset.set_epoch(1)
    other = copied(dataset)
    loader, other_loader = DataLoader(dataset, **options), DataLoader(other, **options)
    for epoch in range(2, 4):
        dataset.set_epoch(epoch)
        other.set_epoch(epoch + 10)
        assert loaded(loader) == expected(sequences, epoch, 0)
        assert loaded(other_loader) == expected(sequences, epoch + 10, 0)


def test_many_datasets_take_few_file_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    datasets = [SequenceDataset(Numbers(), 4) for _ in range(200)]
    assert len(os.listdir("/proc/self/fd")) - before < 10 < len(datasets)


def _set_in_another_process(dataset: SequenceDataset, is_set_first: bool, found: Any) -> None:
    options = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, batch_size=None, num_workers=1, **options)
    if is_set_first:
        dataset.set_epoch(0)
    batches = [loaded(loader)]
    try:
        dataset.set_epoch(1)
    except RuntimeError as error:
        found.put(str(error))
        return
    found.put([*batches, loaded(loader)])


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # a copy of memory, and one by pickle
def test_a_dataset_of_another_process_reaches_its_workers_or_says_that_it_does_not(method):
    context = multiprocessing.get_context(method)
    dataset, found = sequences()[0], context.Queue()
    for is_set_first in (True, False):
        process = context.Process(target=_set_in_another_process, args=(dataset, is_set_first, found))
        process.start()
        result = found.get(timeout=120)
        process.join()
        if is_set_first:
            assert result == [expected(sequences, epoch, 0) for epoch in range(2)]
        else:
            assert "set_epoch(1) cannot reach the workers of process" in result


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_source_that_grows_or_shrinks_is_an_error(num_workers):
    for count in (33, 31):
        source = Numbers()
        dataset = SequenceDataset(source, 4)
        options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = DataLoader(dataset, batch_size=None, **options)
        dataset.set_epoch(0)
        assert sorted(chain.from_iterable(loaded(loader))) == list(SAMPLES)
        source.count = count
        expected_message = f"the source has {count} samples, expected 32.*make another"
        with pytest.raises(RuntimeError, match=expected_message):
            dataset.set_epoch(1)
        with pytest.raises(RuntimeError, match=expected_message):
            len(loader)
        assert len(list(SequenceDataset(source, 4))) == -(-count // 4)


class OnDisk(Numbers):
    """Numbers whose count is in a file, which each process reads."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __len__(self) -> int:
        return int(self.path.read_text())


def test_workers_notice_that_a_source_has_grown_on_disk(tmp_path):
    path = tmp_path / "count"
    path.write_text("32")
    dataset = SequenceDataset(OnDisk(path), 4, shuffle=True)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    assert loaded(loader) == expected(sequences, 0, 0)
    path.write_text("36")
    with pytest.raises(RuntimeError, match="the source has 36 samples, expected 32"):
        loaded(loader)
    del loader
    gc.collect()  # the error holds the loader, whose workers would live on until the process ends
