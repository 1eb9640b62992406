from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.bucket_sampler import BucketSampler
from commons.partition import refined
from tests.commons.datasets import epoch_loaders
from tests.commons.datasets.epoch_loaders import buckets, histories, loaded, loader_of, samples_of
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.partition.internals import loads

shapes = {
    "workloads": st.lists(st.integers(0, 9) | st.floats(0, 1e9), max_size=60),
    "batch_size": st.integers(1, 5),
    "num_ranks": st.integers(1, 4),
    "num_buckets": st.integers(1, 9) | st.just(100),
}


def steps_of(workloads, batch_size, num_ranks, **options):
    """Returns the ranks' batches of each step."""
    options["workloads"] = workloads
    return epoch_loaders.steps_of(buckets, len(workloads), batch_size, num_ranks, **options)


def drawn_groups(num_samples, num_groups):
    """Random groups, a few samples with none."""
    return np.random.default_rng(num_groups).integers(-2, num_groups, num_samples)


@given(**shapes)
def test_each_step_is_divided_by_refined(workloads, batch_size, num_ranks, num_buckets):
    workloads = np.array(workloads)
    undivided = steps_of(workloads, batch_size * num_ranks, 1, num_buckets=num_buckets)
    divided = steps_of(workloads, batch_size, num_ranks, num_buckets=num_buckets)
    for (samples,), step in zip(undivided, divided, strict=True):
        parts = refined(workloads[samples], num_ranks)
        assert list(step) == [np.array(samples)[part].tolist() for part in parts]


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


def test_what_groups_are_called_does_not_matter():
    groups = drawn_groups(100, 12).clip(0)
    names = (groups * 2_654_435_761 % 1_000_003).astype(np.uint64)
    one, other = (steps_of(histories(100), 4, 2, groups=of) for of in (groups, names))
    assert one == other


@given(epoch=st.integers(0, 50), num_buckets=st.integers(2, 12))
def test_a_step_mixes_at_most_two_neighboring_buckets_and_steps_are_shuffled(epoch, num_buckets):
    workloads = np.random.default_rng(0).permutation(240)  # each is its own rank
    steps = [
        workloads[samples_of(s)] for s in steps_of(workloads, 5, 4, epoch=epoch, num_buckets=num_buckets)
    ]
    assert all(np.ptp(step) < 2 * -(-240 // num_buckets) for step in steps)
    means = [step.mean() for step in steps]
    assert means not in (sorted(means), sorted(means, reverse=True))


def test_what_fills_no_step_is_drawn_from_all_samples_and_equal_workloads_are_shuffled():
    last = (steps_of(np.arange(23), 5, 2, epoch=epoch, num_buckets=4)[-1] for epoch in range(100))
    assert set(chain.from_iterable(map(samples_of, last))) == set(range(23))
    first, second = (steps_of(np.ones(40), 5, 2, epoch=epoch) for epoch in (0, 1))
    assert samples_of(first[0]) != samples_of(second[0])


@pytest.mark.parametrize("num_buckets", [1, 4])
@pytest.mark.parametrize("num_samples", [16, 17, 18, 30, 33])
def test_the_last_step_is_kept_dropped_or_filled_by_repetition(num_samples, num_buckets):
    kept, dropped, repeated, usual = (
        steps_of(histories(num_samples), 4, 4, num_buckets=num_buckets, last=last)
        for last in ("keep", "drop", "repeat", None)
    )
    assert kept == usual
    full = num_samples // 16
    assert dropped == kept[:full] == repeated[:full]
    counts = Counter(chain.from_iterable(map(samples_of, repeated)))
    assert counts.keys() == set(range(num_samples)) and max(counts.values()) <= 2
    assert {len(batch) for batch in repeated[-1]} == {-(-(num_samples % 16 or 16) // 4)}


@pytest.mark.parametrize("num_samples", [0, 3, 4, 16, 17, 20])
def test_a_last_step_with_fewer_samples_than_ranks_is_warned_of_before_it_comes(num_samples):
    with warnings_of("commons.bucket_sampler") as chosen:
        for last in ("keep", "repeat"):
            steps_of(histories(num_samples), 4, 4, last=last)
    with warnings_of("commons.bucket_sampler") as found:
        steps = steps_of(histories(num_samples), 4, 4)
    assert chosen == []
    assert len(found) == any(not batch for step in steps for batch in step)
    for message in found:
        assert message.startswith(f"{num_samples} samples leave {num_samples % 16} ")
        assert all(f'last="{last}"' in message for last in ("keep", "drop", "repeat"))


def test_batches_of_several_ranks_are_not_divided_once_more():
    assert buckets(64).batch_size == 4
    sampler = buckets(64, rank=1, num_ranks=2)
    with pytest.raises(RuntimeError, match=r"num_ranks = 2.*iterate over the DataLoader itself"):
        getattr(sampler, "batch_size", None)  # as accelerate's prepare does
    loader = loader_of(sampler, 64, num_workers=1)
    assert loaded(loader) == list(sampler)
    assert len(loader) == 8 and loader.batch_size is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"num_buckets": value}, "num_buckets is ") for value in (0, 1.5)),
        ({"workloads": [1, -2]}, r"workloads\[1\] is -2.0, expected a finite number of at least 0"),
        ({"workloads": [[1, 2]]}, r"workloads has shape \(1, 2\), expected one number per sample"),
        ({"groups": [1]}, r"groups has shape \(1,\) .* expected one integer for each of 2"),
        ({"batch_size": 4, "last": "drop"}, "drops all 2 samples"),
        ({"last": "wrap"}, '"keep", "drop" or "repeat"'),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        BucketSampler(**({"workloads": [1.0, 2.0], "batch_size": 1} | arguments))
