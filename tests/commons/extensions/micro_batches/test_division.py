from __future__ import annotations

import functools
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.micro_batch_divisions import micro_batch_lower_bound
from commons.extensions.micro_batches import (
    balance_micro_batches,
    divide_into_micro_batches,
    micro_batch_imbalance,
)
from commons.extensions.micro_batches.division import number_micro_batches
from commons.partition import imbalance, loads, lower_bound, pack_micro_batches, refined
from commons.partition.packing import check_samples
from commons.perf_model import HSTUFlops
from tests.commons.partition.checks import SLACK, as_lists, check_partition, is_even, parts_at
from tests.commons.partition.drawn_workloads import ARRAYS, PARTS, SMALL, WORKLOADS, homes
from tests.commons.partition.every_function import (
    as_loaded,
    check_alike_in_other_processes,
    check_conserved,
    joined,
)
from tests.commons.partition.speeds import check_speeds, check_wrong_speeds, problems

NAN, INF = float("nan"), float("inf")
RANKS, SAMPLES, CAP, SEEDS = 8, 256, 8192, 20
any_rows = pytest.mark.parametrize("equal_size", [True, False])
NUM_RANKS = st.integers(1, 5)


def on_ranks(ranks):
    """The partition that micro-batches come from."""
    return [np.sort(np.concatenate(rank)) for rank in ranks]


def lists_of(ranks):
    return [as_lists(rank) for rank in ranks]


def check_ranks(workloads, tokens, ranks, cap, equal_size=False):
    """Every result: each sample once, the cap, the same number on every rank, the lightest first."""
    assert len({len(rank) for rank in ranks}) == 1
    micro_batches = [samples for rank in ranks for samples in rank]
    check_partition(micro_batches, len(workloads), len(ranks) * len(ranks[0]), equal_size=False)
    tokens = np.asarray(tokens, dtype=np.int64)
    assert all(len(samples) == 1 or tokens[samples].sum() <= cap for samples in micro_batches)
    for rank in ranks:
        # The order is that of sums of integers; sums of float64 may differ from it in their last bits.
        of_rank = loads(workloads, rank)
        assert (np.diff(of_rank) >= -1e-9 * of_rank.sum()).all()
    assert not equal_size or is_even(on_ranks(ranks))


def rounded_up(count, multiple):
    return -(-count // multiple) * multiple


def fewest_for(tokens, cap):
    """⌈tokens ÷ cap⌉, where a sample above the cap counts as a full micro-batch."""
    return -(-int(np.minimum(np.asarray(tokens, dtype=np.int64), cap).sum()) // cap)


def best_fit_decreasing(tokens, cap):
    """The number of micro-batches it needs; a sample above the cap is alone."""
    left = []
    for amount in sorted(map(int, tokens), reverse=True):
        if amount > cap:
            left.append(-1)
            continue
        fitting = [number for number, room in enumerate(left) if room >= amount]
        if fitting:
            left[min(fitting, key=left.__getitem__)] -= amount
        else:
            left.append(cap - amount)
    return len(left)


@st.composite
def drawn_samples(draw):
    """(workloads, tokens, cap): caps from below the largest sample to far away."""
    workloads = draw(WORKLOADS)
    tokens = draw(st.lists(SMALL, min_size=len(workloads), max_size=len(workloads)))
    return workloads, tokens, draw(st.sampled_from([1, 7, 30, 50, 51, 120, 10**6]))


def drawn_histories(seed, hidden_size=128, longest=4096):
    """(FLOPs, tokens) of `SAMPLES` histories, most of them short and few very long."""
    lengths = np.rint(np.random.default_rng(seed).lognormal(5, 1.2, SAMPLES).clip(1, longest))
    tokens = 2 * lengths.astype(np.int64) + 1
    flops = HSTUFlops(num_layers=1, hidden_size=hidden_size, num_heads=1, head_dim=hidden_size)
    return flops.per_sample(tokens), tokens


def without_warnings(function, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **options)


pack = functools.partial(without_warnings, pack_micro_batches)
balance = functools.partial(without_warnings, balance_micro_batches)


def _tokens(workloads):
    return {"tokens": 1 + as_loaded(workloads) % 5, "max_tokens": 9}


PARTITIONS = {
    "pack_micro_batches": lambda workloads, parts, equal_size: pack_micro_batches(
        workloads, multiple_of=parts, **_tokens(workloads)
    ),
    "balance_micro_batches": lambda workloads, parts, equal_size: joined(
        balance_micro_batches(workloads, num_partitions=parts, equal_size=equal_size, **_tokens(workloads))
    ),
    "divide_into_micro_batches": lambda workloads, parts, equal_size: joined(
        divide_into_micro_batches(
            workloads, partition=np.array_split(as_loaded(workloads), parts), **_tokens(workloads)
        )
    ),
}


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=80, deadline=None)
@given(workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans(), doublings=st.integers(1, 40))
def test_every_sample_is_in_one_part_whatever_the_unit(name, workloads, parts, equal_size, doublings):
    check_conserved(PARTITIONS[name], workloads, parts, equal_size, doublings, None)


def test_other_processes_and_hash_seeds_reach_the_same_partition():
    check_alike_in_other_processes(__name__, "PARTITIONS")


def balance_ranks(workloads, home, num_ranks, equal_size, **options):
    """Micro-batches of each rank together."""
    tokens = np.ones(len(workloads))
    return on_ranks(balance_micro_batches(workloads, tokens, num_ranks, 1_000, equal_size, **options))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), equal_size=st.booleans(), unit=st.sampled_from([1.0, 2.0, 1e-3, 7e5]))
def test_parts_are_whole_and_equal_speeds_change_nothing(problem, equal_size, unit):
    check_speeds(balance_ranks, problem, equal_size, unit)


def test_wrong_speeds_are_named():
    check_wrong_speeds(balance_ranks)


@pytest.mark.parametrize("max_tokens", [150, 300])
def test_fewer_micro_batches_do_not_cost_speeds(max_tokens):
    tokens = np.full(60, 10)
    fast, slow = balance_micro_batches(tokens, tokens, 2, max_tokens, equal_size=False, speeds=[1.0, 0.5])
    assert [sum(len(batch) for batch in rank) for rank in (fast, slow)] == [40, 20]


@given(drawn=drawn_samples(), multiple=st.integers(1, 4), fewest=st.integers(1, 12))
def test_pack_keeps_the_cap_with_few_micro_batches(drawn, multiple, fewest):
    workloads, tokens, cap = drawn
    micro_batches = pack(workloads, tokens, cap, multiple, fewest)
    check_ranks(workloads, tokens, [micro_batches], cap)
    count = len(micro_batches)
    assert count % multiple == 0
    assert count >= max(fewest, fewest_for(tokens, cap))
    assert count <= rounded_up(max(best_fit_decreasing(tokens, cap), fewest), multiple)


@any_rows
@settings(max_examples=80, deadline=None)
@given(drawn=drawn_samples(), num_ranks=NUM_RANKS, fewest=st.integers(1, 4))
def test_balance_keeps_the_cap_on_every_rank(equal_size, drawn, num_ranks, fewest):
    workloads, tokens, cap = drawn
    ranks = balance(workloads, tokens, num_ranks, cap, equal_size, fewest)
    assert len(ranks) == num_ranks
    check_ranks(workloads, tokens, ranks, cap, equal_size)
    count = len(ranks[0])
    assert count >= max(fewest, -(-fewest_for(tokens, cap) // num_ranks))
    # Never more than where the ranks are balanced without a thought of the cap.
    free = refined(workloads, num_ranks, equal_size)
    amounts = np.array(tokens, dtype=np.int64)
    assert count <= max(fewest, *(best_fit_decreasing(amounts[samples], cap) for samples in free))


@given(drawn=drawn_samples(), fewest=st.integers(1, 12))
def test_min_count_that_suffices_is_the_count_and_none_of_enough_samples_is_empty(drawn, fewest):
    workloads, tokens, cap = drawn
    needed = len(pack(workloads, tokens, cap))
    micro_batches = pack(workloads, tokens, cap, min_count=fewest)
    assert len(micro_batches) == max(needed, fewest)
    assert sum(len(samples) > 0 for samples in micro_batches) == min(len(micro_batches), len(workloads))


@any_rows
@settings(max_examples=80, deadline=None)
@given(drawn=drawn_samples(), num_ranks=NUM_RANKS, multiple=st.integers(1, 4), fewest=st.integers(1, 4))
def test_balance_gives_every_rank_a_multiple_and_no_empty_ones_for_it(
    equal_size, drawn, num_ranks, multiple, fewest
):
    workloads, tokens, cap = drawn
    ranks = balance(workloads, tokens, num_ranks, cap, equal_size, fewest, multiple_of=multiple)
    check_ranks(workloads, tokens, ranks, cap, equal_size)
    assert len(ranks[0]) % multiple == 0
    free = refined(workloads, num_ranks, equal_size)
    needed = max(best_fit_decreasing(np.array(tokens, np.int64)[samples], cap) for samples in free)
    assert len(ranks[0]) <= rounded_up(max(needed, fewest), multiple)
    for rank in ranks:
        filled = sum(len(samples) > 0 for samples in rank)
        assert filled == min(sum(map(len, rank)), len(rank))


def test_a_rank_with_a_giant_has_a_sample_for_each_micro_batch():
    tokens = np.array([90, *[10] * 30])
    for multiple in (1, 4):
        ranks = balance_micro_batches(tokens**2, tokens, 2, 100, equal_size=False, multiple_of=multiple)
        assert all(len(samples) for rank in ranks for samples in rank)


def test_strict_refuses_what_is_above_the_cap_and_what_is_empty():
    tokens = [9, 2, 3, 1]
    for function in (pack_micro_batches, functools.partial(balance_micro_batches, num_partitions=2)):
        with pytest.raises(ValueError, match=r"samples \[0\] have more than max_tokens=8 tokens"):
            function(tokens, tokens, max_tokens=8, strict=True)
        with pytest.raises(ValueError, match=r"6 micro-batches per rank are needed, and ranks have \["):
            function(tokens, tokens, max_tokens=9, min_count=6, strict=True)
        result = function(tokens, tokens, max_tokens=9, multiple_of=2, strict=True)
        expected = function(tokens, tokens, max_tokens=9, multiple_of=2)
        assert str(result) == str(expected)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), drawn=drawn_samples(), num_ranks=NUM_RANKS)
def test_divide_keeps_every_sample_on_its_rank(data, drawn, num_ranks):
    workloads, tokens, cap = drawn
    partition = parts_at(data.draw(homes(len(workloads), num_ranks, even=False)), num_ranks)
    ranks = divide_into_micro_batches(workloads, tokens, partition, cap)
    check_ranks(workloads, tokens, ranks, cap)
    assert as_lists(on_ranks(ranks)) == as_lists(partition)
    # The rank that needs most decides.
    of_ranks = [np.array(tokens, dtype=np.int64)[samples] for samples in partition]
    assert max(1, *(fewest_for(of_rank, cap) for of_rank in of_ranks)) <= len(ranks[0])
    assert len(ranks[0]) <= max(1, *(best_fit_decreasing(of_rank, cap) for of_rank in of_ranks))


@settings(max_examples=80, deadline=None)
@given(data=st.data(), drawn=drawn_samples(), num_ranks=NUM_RANKS)
def test_divisions_that_need_not_be_even_keep_to_the_cap_and_the_count(data, drawn, num_ranks):
    workloads, tokens, cap = drawn
    rank_of = np.array(data.draw(homes(len(workloads), num_ranks, even=False)), dtype=np.int64)
    number, count = number_micro_batches(
        *check_samples(workloads, tokens, cap), rank_of, num_ranks, even=False
    )
    ranks = [
        [np.flatnonzero((rank_of == rank) & (number == of_rank)) for of_rank in range(count)]
        for rank in range(num_ranks)
    ]
    check_ranks(workloads, tokens, ranks, cap)
    needed = [best_fit_decreasing(np.array(tokens)[rank_of == rank], cap) for rank in range(num_ranks)]
    assert count <= max(1, *needed)


@pytest.mark.parametrize("room", [1.02, 1.3])
def test_ranks_divided_at_once_are_as_even_as_each_alone(room):
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5, 1.2, (64, 24)), 300).astype(np.int64) + 1
    workloads, partition = (
        (lengths**2 + 512 * lengths).ravel(),
        np.arange(lengths.size).reshape(lengths.shape),
    )
    cap = int(room * lengths.sum() / lengths.shape[0] / 4)
    ranks = divide_into_micro_batches(workloads, lengths.ravel(), partition, cap)
    for samples, micro_batches in zip(partition, ranks, strict=True):
        alone = pack_micro_batches(workloads[samples], lengths.ravel()[samples], cap, min_count=len(ranks[0]))
        at_once, bound = (
            imbalance(workloads, micro_batches),
            lower_bound(workloads[samples], len(alone), False),
        )
        assert at_once <= max(imbalance(workloads[samples], alone), 1.006 * bound)


@any_rows
def test_heavy_tails_are_balanced_at_the_smallest_count(equal_size):
    gaps = []
    for seed in range(SEEDS):
        workloads, tokens = drawn_histories(seed)
        ranks = balance(workloads, tokens, RANKS, CAP, equal_size)
        check_ranks(workloads, tokens, ranks, CAP, equal_size)
        assert RANKS * len(ranks[0]) == rounded_up(fewest_for(tokens, CAP), RANKS)
        gaps.append(imbalance(workloads, on_ranks(ranks)) / lower_bound(workloads, RANKS, equal_size))
    assert min(gaps) >= 1 - 1e-9
    assert np.mean(gaps) <= 1.02


def test_ranks_are_as_balanced_as_refined_where_the_count_allows():
    for seed in range(SEEDS):
        workloads, tokens = drawn_histories(seed)
        ranks = balance(workloads, tokens, RANKS, CAP, min_count=5)
        assert as_lists(on_ranks(ranks)) == as_lists(refined(workloads, RANKS))


@pytest.mark.parametrize("longest", [4095, 512])
@pytest.mark.parametrize("hidden_size", [128, 1024])
def test_packs_as_evenly_as_refined_under_the_same_cap(hidden_size, longest):
    for seed in range(SEEDS):
        workloads, tokens = drawn_histories(seed, hidden_size, longest)
        fewest = -(-int(tokens.sum()) // CAP)
        for more in (0, 1, 4):
            micro_batches = pack_micro_batches(workloads, tokens, CAP, min_count=fewest + more)
            assert len(micro_batches) == fewest + more
            same = refined(workloads, fewest + more, equal_size=False, tokens=tokens, max_tokens=CAP)
            assert imbalance(workloads, micro_batches) <= imbalance(workloads, same) * 1.01


@functools.cache
def all_divisions(num_samples, num_parts):
    """bool `[divisions, parts, samples]`, whether a sample is in a part."""
    part_of = np.array(list(product(range(num_parts), repeat=num_samples)))
    return np.stack([part_of == part for part in range(num_parts)], axis=1)


@pytest.mark.parametrize("related", [True, False])
def test_few_samples_get_as_few_micro_batches_as_there_can_be(related):
    rng = np.random.default_rng(int(related))
    num_ranks, count, found, needs_more = 2, 2, 0, 0
    divisions = all_divisions(6, num_ranks * count)
    for _ in range(100):
        tokens = rng.integers(0, 20, 6)
        workloads = tokens**2 + 10 * tokens if related else rng.integers(0, 500, 6)
        cap = max(int(rng.uniform(0.9, 2.5) * tokens.sum() / 4), 1)
        keeps = ((divisions @ tokens <= cap) | (divisions.sum(-1) == 1)).all(-1)
        of_parts = (divisions[keeps] @ workloads.astype(np.float64)).reshape(-1, num_ranks, count)
        best = float(of_parts.max(1).sum(-1).min(initial=np.inf))
        mean = max(workloads.sum() / num_ranks, 1)
        assert micro_batch_lower_bound(workloads, tokens, num_ranks, count, cap) * mean <= best * SLACK
        ranks = balance(workloads, tokens, num_ranks, cap, equal_size=False)
        if keeps.any():
            found += len(ranks[0]) <= count
            needs_more += len(ranks[0]) > count
    assert found > 50
    assert needs_more <= 5


@given(data=st.data(), workloads=WORKLOADS, num_ranks=st.integers(1, 4), count=st.integers(1, 4))
def test_no_division_at_all_beats_the_bound(data, workloads, num_ranks, count):
    tokens = data.draw(st.lists(SMALL, min_size=len(workloads), max_size=len(workloads)))
    home = data.draw(homes(len(workloads), num_ranks * count, even=data.draw(st.booleans())))
    micro_batches = parts_at(home, num_ranks * count)
    # The smallest cap that the division keeps: those of single samples may be above it.
    several = [loads(tokens, [samples])[0] for samples in micro_batches if len(samples) > 1]
    cap = max(int(max(several, default=1)), 1)
    ranks = [micro_batches[rank * count : (rank + 1) * count] for rank in range(num_ranks)]
    bound = micro_batch_lower_bound(workloads, tokens, num_ranks, count, cap)
    assert 1 <= bound <= micro_batch_imbalance(workloads, ranks) + 1e-9


def test_giants_that_cannot_share_a_step_raise_the_bound():
    # Two ranks, two micro-batches: three giants fill three, so a second one is waited for.
    workloads, tokens = [100, 100, 100, 1, 1], [10, 10, 10, 5, 5]
    assert micro_batch_lower_bound(workloads, tokens, 2, 2, max_tokens=10) * 151 == pytest.approx(200)


def test_micro_batch_imbalance_adds_up_the_largest_of_every_step():
    assert micro_batch_imbalance([1, 2, 3, 10], [[[0], [1, 2]], [[], [3]]]) == (1 + 10) / 8
    assert micro_batch_imbalance([], [[[], []]] * 3) == 1
    assert micro_batch_imbalance([0, 0], [[[0]], [[1]]]) == 1


ALL = {
    "pack": lambda workloads, tokens: [pack(workloads, tokens, 40, 2)],
    "balance": lambda workloads, tokens: balance(workloads, tokens, 2, 40),
    "balance, unequal rows": lambda workloads, tokens: balance(workloads, tokens, 2, 40, False),
    "divide": lambda workloads, tokens: divide_into_micro_batches(
        workloads, tokens, parts_at(np.arange(len(tokens)) % 2, 2), 40
    ),
}
every_function = pytest.mark.parametrize("name", ALL)


@every_function
@pytest.mark.parametrize("kind", [*ARRAYS, lambda values: torch.tensor(values, dtype=torch.int64)])
def test_kind_and_type_of_the_samples_do_not_matter(name, kind):
    workloads = [5, 0, 17, 3, 3, 8, 1, 2, 40]
    tokens = [9, 2, 18, 7, 7, 7, 0, 3, 41]
    expected = lists_of(ALL[name](np.array(workloads, np.float64), np.array(tokens, np.float64)))
    assert lists_of(ALL[name](kind(workloads), kind(tokens))) == expected


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.uint32, np.int64])
def test_type_of_the_counts_does_not_matter(kind):
    workloads, tokens = np.arange(12), np.arange(12)
    far = int(np.iinfo(kind).max)

    def packed(of_kind):
        return as_lists(pack_micro_batches(workloads, tokens, of_kind(far), of_kind(3), of_kind(2)))

    def balanced(of_kind):
        ranks = balance_micro_batches(workloads, tokens, of_kind(2), of_kind(far), True, of_kind(2))
        return lists_of(ranks)

    assert packed(kind) == packed(int)
    assert balanced(kind) == balanced(int)


@pytest.mark.parametrize("far", [10**6, 2**53, 2**62, 2**70])
def test_a_cap_changes_nothing_where_it_is_far_away(far):
    workloads, tokens = drawn_histories(0)
    expected = refined(workloads, 5, equal_size=False)
    packed = pack_micro_batches(workloads, tokens, far, min_count=5)
    assert imbalance(workloads, packed) <= imbalance(workloads, expected) * 1.01
    (one,) = pack_micro_batches(workloads, tokens, far)
    assert one.tolist() == list(range(SAMPLES))
    ranks = balance_micro_batches(workloads, tokens, RANKS, far)
    assert as_lists(on_ranks(ranks)) == as_lists(refined(workloads, RANKS))
    assert len(ranks[0]) == 1


def test_samples_above_the_cap_are_alone_and_named_where_it_was_called():
    workloads, tokens = [3, 1, 4, 1, 5, 9], [2, 12, 3, 1, 30, 4]
    message = r"samples \[1, 4\] have more than max_tokens=10 tokens \(sample 4 has 30\)"
    with pytest.warns(UserWarning, match=message) as named:
        micro_batches = pack_micro_batches(workloads, tokens, 10)
    assert [warning.filename for warning in named] == [__file__]
    assert as_lists(micro_batches) == [[1], [4], [0, 2, 3, 5]]
    for equal_size in (True, False):
        with pytest.warns(UserWarning, match=message) as named:
            ranks = balance_micro_batches(workloads, tokens, 2, 10, equal_size)
        assert [warning.filename for warning in named] == [__file__]
        check_ranks(workloads, tokens, ranks, 10, equal_size)


def test_of_many_samples_above_the_cap_ten_are_named():
    message = r"samples \[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\] and more have"
    with pytest.warns(UserWarning, match=message) as named:
        micro_batches = pack_micro_batches(range(12), [5] * 12, 4)
    assert len(named) == 1
    assert as_lists(micro_batches) == [[sample] for sample in range(12)]


@settings(max_examples=60, deadline=None)
@given(drawn=drawn_samples(), num_ranks=NUM_RANKS)
def test_nothing_is_warned_of_but_samples_above_the_cap(drawn, num_ranks):
    workloads, tokens, cap = drawn
    above = [sample for sample, amount in enumerate(tokens) if amount > cap]
    for call in (
        lambda: pack_micro_batches(workloads, tokens, cap),
        lambda: balance_micro_batches(workloads, tokens, num_ranks, cap),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert len(caught) == bool(above)
        assert not above or str(above[:10]) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition = parts_at(np.arange(len(workloads)) % num_ranks, num_ranks)
        divide_into_micro_batches(workloads, tokens, partition, cap)


@pytest.mark.parametrize(
    ("workloads", "tokens", "cap", "sizes"),
    [
        ([], [], 5, [0]),
        ([7], [3], 5, [1]),
        ([0] * 6, [1] * 6, 3, [3, 3]),
        ([0] * 6, [0] * 6, 3, [6]),
        ([1] * 6, [0] * 6, 1, [6]),
        ([2] * 5, [4] * 5, 3, [1] * 5),
    ],
)
def test_corner_cases_of_one_rank(workloads, tokens, cap, sizes):
    micro_batches = pack(workloads, tokens, cap)
    assert sorted(map(len, micro_batches)) == sizes
    assert lists_of(balance(workloads, tokens, 1, cap)) == [as_lists(micro_batches)]
    divided = divide_into_micro_batches(workloads, tokens, [range(len(workloads))], cap)
    assert lists_of(divided) == [as_lists(micro_batches)]


def test_fewer_samples_than_micro_batches_leave_some_empty():
    assert as_lists(pack_micro_batches([2, 1], [1, 1], 9, min_count=4)) == [[], [], [1], [0]]
    ranks = balance_micro_batches([2, 1, 1], [1, 1, 1], 2, 9, min_count=3)
    assert lists_of(ranks) == [[[], [], [0]], [[], [1], [2]]]
    for num_ranks in (1, 3):
        assert lists_of(balance_micro_batches([], [], num_ranks, 5, min_count=2)) == [[[], []]] * num_ranks
        assert lists_of(divide_into_micro_batches([], [], [[]] * num_ranks, 5)) == [[[]]] * num_ranks


def test_samples_that_cost_nothing_are_spread_evenly():
    ranks = balance_micro_batches([0] * 12, [2] * 12, 3, 4)
    assert [[len(samples) for samples in rank] for rank in ranks] == [[2, 2]] * 3


FROM_SAMPLES = {
    "pack": pack_micro_batches,
    "balance": lambda workloads, tokens, cap: balance_micro_batches(workloads, tokens, 2, cap),
    "divide": lambda workloads, tokens, cap: divide_into_micro_batches(workloads, tokens, [[0, 1], [2]], cap),
}


@pytest.mark.parametrize("name", FROM_SAMPLES)
@pytest.mark.parametrize(
    ("workloads", "tokens", "cap", "message"),
    [
        ([1, -2, 3], [1, 1, 1], 5, r"workloads\[1\] is -2"),
        ([1, NAN, 3], [1, 1, 1], 5, r"workloads\[1\] is nan"),
        ([1, 2, INF], [1, 1, 1], 5, r"workloads\[2\] is inf"),
        ([1, 2, 3], [1, 1], 5, "tokens has 2 values for 3 workloads"),
        ([1, 2, 3], [[1, 1, 1]], 5, r"tokens has shape \(1, 3\)"),
        ([1, 2, 3], [1, -1, 1], 5, r"tokens\[1\] is -1"),
        ([1, 2, 3], [1, 1, NAN], 5, r"tokens\[2\] is nan"),
        ([1, 2, 3], [1, 1, INF], 5, r"tokens\[2\] is inf"),
        ([1, 2, 3], [1, 2.5, 1], 5, r"tokens\[1\] is 2.5"),
        ([1, 2, 3], [1, 1, 1], 0, "max_tokens is 0"),
        ([1, 2, 3], [1, 1, 1], -4, "max_tokens is -4"),
        ([1, 2, 3], [1, 1, 1], 5.5, "max_tokens is 5.5"),
        ([1, 2, 3], [1, 1, 1], NAN, "max_tokens is nan"),
    ],
)
def test_wrong_samples_and_caps_are_named(name, workloads, tokens, cap, message):
    with pytest.raises(ValueError, match=message):
        FROM_SAMPLES[name](workloads, tokens, cap)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("multiple_of", lambda value: pack_micro_batches([1, 2], [1, 1], 5, multiple_of=value)),
        ("min_count", lambda value: pack_micro_batches([1, 2], [1, 1], 5, min_count=value)),
        ("min_count", lambda value: balance_micro_batches([1, 2], [1, 1], 2, 5, min_count=value)),
        ("num_partitions", lambda value: balance_micro_batches([1, 2], [1, 1], value, 5)),
    ],
)
@pytest.mark.parametrize("value", [0, -3, 2.5, NAN])
def test_wrong_counts_are_named(argument, call, value):
    with pytest.raises(ValueError, match=f"{argument} is {value}"):
        call(value)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([[0, 1], [1]], "partition has 3 indices"),
        ([[0], [2]], "partition has 2 indices"),
        ([[0, 1, 2], [3]], "partition has 4 indices"),
        ([], "num_partitions is 0"),
    ],
)
def test_wrong_partitions_to_divide_are_named(partition, message):
    with pytest.raises(ValueError, match=message):
        divide_into_micro_batches([1, 2, 3], [1, 1, 1], partition, 5)
