"""Groups of samples that stay whole, from numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.extensions.controller import split_groups
from commons.partition import loads, refined
from tests.commons.partition.checks import as_lists, check_partition
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS


@given(data=st.data(), workloads=WORKLOADS, parts=PARTS)
def test_groups_are_whole_and_negative_labels_are_none(data, workloads, parts):
    labels = data.draw(st.lists(st.integers(-2, 5), min_size=len(workloads), max_size=len(workloads)))
    partition = split_groups(workloads, np.array(labels, dtype=np.int64), parts)
    check_partition(partition, len(workloads), parts, equal_size=False)
    part_of = {sample: part for part, samples in enumerate(as_lists(partition)) for sample in samples}
    for label in set(labels):
        together = {part_of[sample] for sample, other in enumerate(labels) if other == label >= 0}
        assert len(together) <= 1
    alone = [-1] * len(workloads)
    assert as_lists(split_groups(workloads, alone, parts)) == as_lists(refined(workloads, parts))


@given(seed=st.integers(0, 10**6), parts=PARTS, size=st.integers(1, 4))
def test_groups_of_one_size_are_placed_as_refined_places_samples(seed, parts, size):
    rng = np.random.default_rng(seed)
    work = rng.integers(0, 1000, int(rng.integers(1, 40)))
    best = refined(work, parts)
    groups = np.arange(len(work)).repeat(size)
    shares = np.zeros(len(groups), dtype=np.int64)
    shares[::size] = work  # the first sample of a group has all its work
    partition = split_groups(shares, groups, parts)
    assert loads(shares, partition).tolist() == loads(work, best).tolist()
    assert [len(samples) for samples in partition] == [size * len(samples) for samples in best]


def test_groups_are_one_integer_per_sample():
    for wrong in ([0, 1], [0.0, 1.0, 2.0]):
        with pytest.raises(ValueError, match=r"groups has shape .* expected one integer for each of 3"):
            split_groups([1, 2, 3], wrong, 2)
