from collections import Counter
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from commons.datasets import BucketSampler, SequenceDataset
from commons.partition import loads, refined
from tests.commons.distributed.errors_and_warnings import warnings_of

shapes = {
    "workloads": st.lists(st.integers(0, 9) | st.floats(0, 1e9), max_size=60),
    "batch_size": st.integers(1, 5),
    "num_ranks": st.integers(1, 4),
    "num_buckets": st.integers(1, 9) | st.just(100),
}


def samplers(workloads, batch_size, num_ranks, **options):
    return [BucketSampler(workloads, batch_size, rank, num_ranks, **options) for rank in range(num_ranks)]


def steps_of(workloads, batch_size, num_ranks, epoch=0, start_step=0, **options):
    """Returns the ranks' batches of each step."""
    by_rank = []
    for sampler in samplers(workloads, batch_size, num_ranks, **options):
        sampler.set_epoch(epoch, start_step)
        by_rank.append(list(sampler))
        assert len(by_rank[-1]) == len(sampler)
    return list(zip(*by_rank, strict=True))


def samples_of(step):
    return sorted(sample for batch in step for sample in batch)


class IndexSource:
    """Samples are their indices, and a batch is a list of them."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return index

    def collate(self, samples, batch_size):
        return samples


def drawn_groups(num_samples, num_groups):
    """Random groups, a few samples with none; None for none at all."""
    if num_groups is None:
        return None
    return np.random.default_rng(num_groups).integers(-2, num_groups, num_samples)


def histories(count, seed=0):
    return np.random.default_rng(seed).lognormal(5, 1.2, count)


@settings(max_examples=40)
@given(**shapes, num_groups=st.none() | st.integers(1, 20))
def test_every_sample_is_in_exactly_one_batch_of_one_rank(
    workloads, batch_size, num_ranks, num_groups, **options
):
    groups = drawn_groups(len(workloads), num_groups)
    steps = steps_of(workloads, batch_size, num_ranks, groups=groups, **options)
    assert sorted(chain.from_iterable(map(samples_of, steps))) == list(range(len(workloads)))
    for number, step in enumerate(steps, 1):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1 and 0 < sum(sizes) <= batch_size * num_ranks
        assert set(sizes) == {batch_size} or number == len(steps)


@settings(max_examples=40)
@given(**shapes, num_groups=st.none() | st.integers(1, 20), epoch=st.integers(0, 3))
def test_resumed_is_as_uninterrupted(workloads, batch_size, num_ranks, num_groups, **options):
    options |= {"seed": 5, "groups": drawn_groups(len(workloads), num_groups)}
    whole = steps_of(workloads, batch_size, num_ranks, **options)
    for start in {0, min(1, len(whole)), len(whole) // 2, len(whole)}:
        assert steps_of(workloads, batch_size, num_ranks, start_step=start, **options) == whole[start:]


@settings(max_examples=40)
@given(**shapes)
def test_each_step_is_divided_by_refined(workloads, batch_size, num_ranks, num_buckets):
    workloads = np.array(workloads)
    undivided = steps_of(workloads, batch_size * num_ranks, 1, num_buckets=num_buckets)
    divided = steps_of(workloads, batch_size, num_ranks, num_buckets=num_buckets)
    for (samples,), step in zip(undivided, divided, strict=True):
        parts = refined(workloads[samples], num_ranks)
        assert list(step) == [np.array(samples)[part].tolist() for part in parts]


@settings(max_examples=40)
@given(**shapes, num_groups=st.integers(1, 20))
def test_a_group_falls_into_few_steps_and_a_step_is_no_worse_than_rebalanced_samples(
    workloads, batch_size, num_ranks, num_buckets, num_groups
):
    workloads, groups = np.array(workloads), drawn_groups(len(workloads), num_groups)
    steps = steps_of(workloads, batch_size, num_ranks, num_buckets=num_buckets, groups=groups)
    own_groups = np.where(groups < 0, -1 - np.arange(len(groups)), groups)
    places = sum(len(set(own_groups[samples_of(step)])) for step in steps)
    # Each cut between steps, and between buckets, divides at most one group.
    assert places <= len(set(own_groups)) + len(steps) + num_buckets
    for step in steps:
        samples = np.array(samples_of(step))
        largest = max(workloads[batch].sum() for batch in step)
        best = loads(workloads[samples], refined(workloads[samples], num_ranks)).max()
        assert largest <= 1.011 * best + 1e-6 * workloads.max(initial=0)


@pytest.mark.parametrize("num_buckets", [1, 8])
def test_small_groups_stay_on_one_rank(num_buckets):
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.arange(512) // 4)
    workloads = rng.integers(20, 200, len(groups))
    for step in steps_of(workloads, 16, 4, num_buckets=num_buckets, groups=groups):
        for group in set(groups[samples_of(step)]):
            assert sum(group in groups[batch] for batch in step) == 1


@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_what_groups_are_called_does_not_matter(dtype):
    groups = drawn_groups(100, 12).clip(0)
    names = (groups * 2_654_435_761 % 1_000_003).astype(dtype)
    one, other = (steps_of(histories(100), 4, 2, groups=of) for of in (groups, names))
    assert one == other


@pytest.mark.parametrize("num_buckets", [1, 8])
def test_epochs_and_seeds_differ_and_repeat(num_buckets):
    def epoch_of(epoch, seed=0):
        return steps_of(histories(100), 4, 2, epoch=epoch, num_buckets=num_buckets, seed=seed)

    first = epoch_of(0)
    assert epoch_of(0) == first
    assert epoch_of(1) != first
    assert epoch_of(0, seed=1) != first
    sampler = BucketSampler(histories(100), 4, 0, 2, num_buckets)
    for _ in range(2):  # it starts at epoch 0 and keeps it until another is set
        assert list(sampler) == [batch for batch, _ in first]
    sampler.set_epoch(1, start_step=2)
    sampler.set_epoch(0)
    assert list(sampler) == [batch for batch, _ in first]


@pytest.mark.parametrize("num_samples", [0, 3, 96, 100])
def test_one_bucket_has_the_steps_of_a_shuffled_dataset(num_samples):
    source = IndexSource(num_samples)
    plain = [SequenceDataset(source, 4, rank, 3, shuffle=True, seed=7) for rank in range(3)]
    for dataset in plain:
        dataset.set_epoch(2)
    bucketed = steps_of(histories(num_samples), 4, 3, epoch=2, num_buckets=1, seed=7)
    assert list(map(samples_of, bucketed)) == list(map(samples_of, zip(*plain, strict=True)))


@settings(max_examples=20)
@given(epoch=st.integers(0, 50), num_buckets=st.integers(2, 12))
def test_a_step_mixes_at_most_two_neighboring_buckets(epoch, num_buckets):
    workloads = np.random.default_rng(0).permutation(240)  # each is its own rank
    largest_bucket = -(-240 // num_buckets)
    for step in steps_of(workloads, 5, 4, epoch=epoch, num_buckets=num_buckets):
        assert np.ptp(workloads[samples_of(step)]) < 2 * largest_bucket


def test_steps_come_in_random_order():
    lengths = np.arange(400)
    means = [lengths[samples_of(step)].mean() for step in steps_of(lengths, 5, 4)]
    assert means not in (sorted(means), sorted(means, reverse=True))


def test_what_fills_no_step_is_drawn_from_all_samples():
    last = (steps_of(np.arange(23), 5, 2, epoch=epoch, num_buckets=4)[-1] for epoch in range(100))
    assert set(chain.from_iterable(map(samples_of, last))) == set(range(23))


def test_equal_workloads_are_divided_by_the_shuffle():
    first, second = (steps_of(np.ones(40), 5, 2, epoch=epoch) for epoch in (0, 1))
    assert samples_of(first[0]) != samples_of(second[0])


def test_a_data_loader_collates_the_batches():
    source = IndexSource(26)
    for sampler in samplers(histories(26), 3, 4, num_buckets=2):
        loader = DataLoader(source, batch_sampler=sampler, collate_fn=partial(source.collate, batch_size=3))
        sampler.set_epoch(1, start_step=1)
        assert list(loader) == list(sampler) and len(loader) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": 0}, "batch_size = 0: expected at least 1"),
        ({"rank": 2, "num_ranks": 2}, "rank = 2: expected 0 to 1, as num_ranks = 2"),
        ({"rank": -1}, "rank = -1: expected 0 to 0"),
        ({"num_buckets": 0}, "num_buckets is 0, expected a whole number of at least 1"),
        ({"seed": -1}, "seed = -1: expected at least 0"),
        ({"workloads": [1, -2]}, r"workloads\[1\] is -2.0, expected a finite number of at least 0"),
        ({"workloads": [float("nan")]}, r"workloads\[0\] is nan"),
        ({"groups": [1]}, r"groups has shape \(1,\) and dtype int64, expected one integer for each of 2"),
        ({"groups": [1, 0.5]}, "dtype float64, expected one integer"),
        ({"workloads": [[1, 2]]}, r"workloads has shape \(1, 2\), expected one number per sample"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        BucketSampler(**({"workloads": [1.0, 2.0], "batch_size": 1} | arguments))
    sampler = BucketSampler(np.ones(5), batch_size=2)
    with pytest.raises(ValueError, match="epoch = -1: expected at least 0"):
        sampler.set_epoch(-1)
    with pytest.raises(ValueError, match="start_step = 4: expected 0 to 3"):
        sampler.set_epoch(0, start_step=4)


@pytest.mark.parametrize("num_buckets", [1, 4])
@pytest.mark.parametrize("num_samples", [16, 17, 18, 30, 33])
def test_the_last_step_is_kept_dropped_or_filled_by_repetition(num_samples, num_buckets):
    work, ranks = histories(num_samples), 4

    def epoch(last):
        samplers = [BucketSampler(work, 4, rank, ranks, num_buckets, last=last) for rank in range(ranks)]
        assert len({len(sampler) for sampler in samplers}) == 1
        batches = [list(sampler) for sampler in samplers]
        assert all(len(of_rank) == len(samplers[0]) for of_rank in batches)
        return batches

    kept, dropped, repeated = epoch("keep"), epoch("drop"), epoch("repeat")
    assert kept == [list(BucketSampler(work, 4, rank, ranks, num_buckets)) for rank in range(ranks)]
    full = num_samples // 16
    assert dropped == [of_rank[:full] for of_rank in kept]
    assert [of_rank[:full] for of_rank in repeated] == dropped
    counts = Counter(chain.from_iterable(chain.from_iterable(repeated)))
    assert counts.keys() == set(range(num_samples)) and max(counts.values()) <= 2
    assert {len(of_rank[-1]) for of_rank in repeated} == {-(-(num_samples % 16 or 16) // ranks)}
    if num_samples % 16:
        for of_rank in repeated:  # none is empty
            assert len(list(DataLoader(torch.arange(num_samples), batch_sampler=of_rank))) == full + 1


@pytest.mark.parametrize("num_samples", [0, 1, 3, 4, 16, 17, 19, 20, 30, 32])
def test_a_last_step_with_fewer_samples_than_ranks_is_warned_of_before_it_comes(num_samples):
    work, ranks = histories(num_samples), 4
    with warnings_of("commons.datasets.bucket_sampler") as chosen:
        for last in ("keep", "drop", "repeat"):
            if last != "drop" or num_samples >= 16 or not num_samples:
                samplers(work, 4, ranks, last=last)
    with warnings_of("commons.datasets.bucket_sampler") as found:
        batches = [list(sampler) for sampler in samplers(work, 4, ranks)]
    assert chosen == []
    assert len(found) == any(not batch for of_rank in batches for batch in of_rank)
    for message in found:
        assert message.startswith(f"{num_samples} samples leave {num_samples % 16} for the last step of 4")
        assert all(f'last="{last}"' in message for last in ("keep", "drop", "repeat"))


def test_batches_of_several_ranks_are_not_divided_once_more():
    sampler = BucketSampler(np.ones(10), 4)
    assert sampler.batch_size == BatchSampler(range(10), 4, drop_last=False).batch_size == 4
    for sampler in samplers(np.ones(64), 4, 2):
        with pytest.raises(
            RuntimeError, match=r"alone, as num_ranks = 2.*iterate over the DataLoader itself"
        ):
            getattr(sampler, "batch_size", None)  # as accelerate's prepare does
        for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
            loader = DataLoader(range(64), batch_sampler=sampler, **options)
            assert [batch.tolist() for batch in loader] == list(sampler)
            assert len(loader) == 8 and loader.batch_size is None


def test_dropping_all_samples_is_an_error():
    with pytest.raises(ValueError, match="drops all 3 samples"):
        BucketSampler([1, 2, 3], 4, 0, 2, last="drop")
    with pytest.raises(ValueError, match='"keep", "drop" or "repeat"'):
        BucketSampler([1, 2, 3], 4, 0, 2, last="wrap")
