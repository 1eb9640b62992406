"""Samples that `rebalance` moves, and those that it leaves at home."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.partition import imbalance, lower_bound, rebalance, refined
from tests.commons.partition.checks import SLACK, as_lists, check_partition, part_of, parts_at
from tests.commons.partition.drawn_workloads import TOLERANCES, per_sample, samples_at_home
from tests.commons.partition.every_function import FUNCTIONS, problems_of
from tests.commons.partition.heavy_tails import FLOPS, ROWS, draw_tokens
from tests.commons.partition.internals import refine

BYTES_PER_TOKEN = 16
any_sizes = pytest.mark.parametrize("equal_size", [True, False])


@given(problem=problems_of(FUNCTIONS["rebalance"]), tolerance=TOLERANCES.filter(bool))
def test_meets_the_tolerance_or_is_near_what_refined_attains(problem, tolerance):
    workloads, parts, equal_size = problem.workloads, problem.parts, problem.equal_size
    priced = {name: problem.options.get(name) for name in ("sizes", "ranks_per_node")}
    partition = rebalance(workloads, problem.home, parts, tolerance, equal_size=equal_size, **priced)
    bound = (1 + tolerance) * lower_bound(workloads, parts, equal_size)
    attained = (1 + 1.2 * tolerance) * imbalance(workloads, refined(workloads, parts, equal_size))
    assert imbalance(workloads, partition) <= max(bound, attained) * SLACK


@any_sizes
@given(data=st.data())
def test_nothing_moves_within_the_tolerances(equal_size, data):
    workloads, home, parts = data.draw(samples_at_home(even=equal_size))
    tokens = data.draw(per_sample(len(home)))
    at_home = parts_at(home, parts)
    tolerance = imbalance(workloads, at_home) / lower_bound(workloads, parts, equal_size) * SLACK - 1
    even_tokens = {"tokens": tokens, "token_tolerance": imbalance(tokens, at_home) * SLACK - 1}
    for partition in (
        refine(workloads, at_home, tolerance, equal_size),
        rebalance(workloads, home, parts, tolerance, equal_size=equal_size),
        rebalance(workloads, home, parts, tolerance, equal_size=equal_size, **even_tokens),
        rebalance([0] * len(home), home, parts, equal_size=equal_size),
    ):
        assert as_lists(partition) == as_lists(at_home)


def test_the_smallest_samples_move_and_stay_in_their_node_if_they_can():
    for sizes, expected in (([1, 9, 1, 1], [1, 0]), ([9, 1, 1, 1], [0, 1])):
        partition = rebalance([5, 5, 1, 1], [0, 0, 1, 1], 2, sizes=sizes)
        assert part_of(partition)[:2].tolist() == expected
    for ranks_per_node, expected in ((None, 0), (2, 2), (4, 0)):
        partition = rebalance([5, 5], [3, 3], 4, ranks_per_node=ranks_per_node, equal_size=False)
        assert sorted(part_of(partition).tolist()) == [expected, 3]


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(
    ("lengths", "tolerance", "most_moved", "across_nodes"),
    [
        ("lognormal", 0.01, 0.2, 0.01),
        ("zipf", 0.01, 0.2, 0.08),
        ("lognormal", None, 0.26, 0.01),
        ("zipf", None, 0.26, 0.13),
    ],
)
def test_few_samples_and_bytes_move_for_nearly_all_that_can_be_gained(
    lengths, tolerance, most_moved, across_nodes, ranks
):
    rng = np.random.default_rng(0)
    home = np.repeat(np.arange(ranks), ROWS)
    moved, worse, crossed = {1: [], 8: []}, [], {1: [], 8: []}
    for _ in range(10):
        tokens = draw_tokens(lengths, rng, len(home))
        workloads, sizes = FLOPS.per_sample(tokens), BYTES_PER_TOKEN * tokens
        for per_node in moved:
            partition = rebalance(workloads, home, ranks, tolerance, sizes, per_node)
            away, abroad = part_of(partition) != home, part_of(partition) // 8 != home // 8
            moved[per_node].append([away.mean(), sizes[away].sum() / sizes.sum()])
            crossed[per_node].append(sizes[abroad].sum() / sizes.sum())
            worse.append(imbalance(workloads, partition) / imbalance(workloads, refined(workloads, ranks)))
    assert (np.mean(moved[1], 0) <= most_moved).all()
    assert np.max(worse) <= 1.002 + (tolerance or 0.001)
    assert np.mean(crossed[8]) <= across_nodes
    assert ranks == 8 or np.mean(crossed[8]) < np.mean(crossed[1])


@pytest.mark.parametrize("max_tokens", [None, 1.2])
@pytest.mark.parametrize("parts", [2, 64])
def test_from_one_part_light_samples_stay_and_the_others_are_balanced(parts, max_tokens):
    tokens = draw_tokens("lognormal", np.random.default_rng(0), 64 * ROWS)
    workloads, home = FLOPS.per_sample(tokens), np.zeros(len(tokens), dtype=np.int64)
    caps = {}
    if max_tokens is not None:
        caps = {"tokens": tokens, "max_tokens": int(max_tokens * tokens.sum() / parts)}
    partition = rebalance(workloads, home, parts, equal_size=False, **caps)
    check_partition(partition, len(workloads), parts, equal_size=False)
    attained = imbalance(workloads, refined(workloads, parts, equal_size=False, **caps))
    assert imbalance(workloads, partition) <= 1.02 * attained
    assert len(partition[0]) >= len(tokens) / parts
    if max_tokens is None:
        assert workloads[partition[0]].mean() < 0.6 * workloads.mean()


@pytest.mark.parametrize(
    ("per_node", "in_node", "abroad", "most_moved", "most_abroad"),
    [(None, 4, 5, 14, 14), (5, 4, 5, 14, 0), (5, 0, 5, 80, 14)],
    ids=["of all", "of the node", "what the node lacks"],
)
def test_the_lightest_come_back_where_the_heaviest_leave(per_node, in_node, abroad, most_moved, most_abroad):
    light, heavy = [*(5 * [60]), 40, 1, 1], 8 * [60]
    workloads = [1000, *(7 * [30]), *(in_node * light), *((4 - in_node) * heavy), *(abroad * light)]
    home = np.repeat(np.arange(10), 8)  # of ten parts, the first five are a node
    partition = rebalance(workloads, home, 10, ranks_per_node=per_node)
    part = part_of(partition)
    assert sorted(np.array(workloads)[partition[0]]) == 7 * [1] + [1000]
    assert np.count_nonzero(part != home) <= most_moved
    assert np.count_nonzero(part // 5 != home // 5) <= most_abroad
