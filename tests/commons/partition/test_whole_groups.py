"""Groups of samples that stay whole, from numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.partition import loads, refined
from tests.commons.partition.checks import as_lists, check_partition
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS


@given(data=st.data(), workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans())
def test_groups_are_whole_and_negative_labels_are_none(data, workloads, parts, equal_size):
    labels = data.draw(st.lists(st.integers(-2, 5), min_size=len(workloads), max_size=len(workloads)))
    partition = refined(workloads, parts, equal_size, whole_groups=labels)
    check_partition(partition, len(workloads), parts, equal_size=False)
    part_of = {sample: part for part, samples in enumerate(as_lists(partition)) for sample in samples}
    for label in set(labels):
        together = {part_of[sample] for sample, other in enumerate(labels) if other == label >= 0}
        assert len(together) <= 1
    alone = [-1] * len(workloads)
    assert as_lists(refined(workloads, parts, equal_size, whole_groups=alone)) == as_lists(
        refined(workloads, parts, equal_size)
    )


@given(seed=st.integers(0, 10**6), parts=PARTS, size=st.integers(1, 4), equal_size=st.booleans())
def test_groups_of_one_size_are_placed_as_refined_places_samples(seed, parts, size, equal_size):
    rng = np.random.default_rng(seed)
    work = rng.integers(0, 1000, int(rng.integers(1, 40)))
    limits = {"max_tokens": 5 * len(work) // parts + 5, "speeds": rng.uniform(0.5, 1, parts)}
    best = refined(work, parts, equal_size, tokens=np.arange(len(work)) % 5, **limits)
    groups = np.arange(len(work)).repeat(size)
    shares = np.zeros(len(groups), dtype=np.int64)
    shares[::size] = work  # the first sample of a group has all its work, and its tokens
    tokens = np.where(np.arange(len(groups)) % size == 0, groups % 5, 0)
    partition = refined(shares, parts, equal_size, whole_groups=groups, tokens=tokens, **limits)
    assert loads(shares, partition).tolist() == loads(work, best).tolist()
    assert [len(samples) for samples in partition] == [size * len(samples) for samples in best]


def test_groups_are_one_integer_per_sample():
    for wrong in ([0, 1], [0.0, 1.0, 2.0]):
        with pytest.raises(ValueError, match=r"groups has shape .* expected one integer for each of 3"):
            refined([1, 2, 3], 2, whole_groups=wrong)
