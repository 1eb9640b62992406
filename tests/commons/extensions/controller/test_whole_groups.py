"""Groups of samples that stay whole, from numbers alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commons.extensions.controller import split_groups
from commons.partition import refined
from tests.commons.partition.arguments import check_kinds_of_arguments, check_wrong_arguments
from tests.commons.partition.checks import as_lists, part_of
from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS
from tests.commons.partition.every_function import Function, check_properties, problems_of
from tests.commons.partition.internals import loads
from tests.commons.partition.recorded_plans import checksum, problems

SPLIT = Function(
    lambda workloads, home, parts, equal_size: split_groups(
        workloads, np.array(home, dtype=np.int64) - 2, parts
    ),
    parts_each=None,
)


@given(problem=problems_of(SPLIT))
def test_each_sample_once_whatever_the_unit(problem):
    check_properties(SPLIT, problem)


def test_wrong_arguments_are_named_and_their_kind_does_not_matter():
    check_wrong_arguments(split_groups)
    check_kinds_of_arguments(split_groups)


def test_plans_are_the_same_on_every_machine():
    splits = (split_groups(workloads, homes["anywhere"], parts) for workloads, parts, homes, _ in problems())
    assert checksum(splits) == 1037150140


@given(data=st.data(), workloads=WORKLOADS, parts=PARTS)
def test_groups_are_whole_and_negative_labels_are_none(data, workloads, parts):
    drawn = data.draw(st.lists(st.integers(-2, 5), min_size=len(workloads), max_size=len(workloads)))
    labels = np.array(drawn, dtype=np.int64)
    chunk_of = part_of(split_groups(workloads, labels, parts))
    assert all(len(set(chunk_of[labels == label])) <= 1 for label in range(6))
    alone = [-1] * len(workloads)
    assert as_lists(split_groups(workloads, alone, parts)) == as_lists(refined(workloads, parts))


def test_groups_of_several_sizes_follow_the_load():
    assert as_lists(split_groups([3, 3, 2, 2, 2], [0, 0, 1, 2, 3], 2)) == [[0, 1], [2, 3, 4]]


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
