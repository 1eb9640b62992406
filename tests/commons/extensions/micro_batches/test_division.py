"""Samples of ranks in micro-batches under a token cap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.extensions.micro_batches import pack_micro_batches
from commons.partition import imbalance, refined
from commons.partition.problem import indices_of_parts, number_of_part
from commons.perf_model import HSTUFlops
from tests.commons.extensions.micro_batches.divided import best_fit_decreasing, fewest_for
from tests.commons.extensions.micro_batches.internals import (
    check_samples,
    micro_batch_imbalance,
    number_micro_batches,
)
from tests.commons.partition.arguments import check_kinds_of_arguments, check_wrong_arguments
from tests.commons.partition.checks import as_lists, check_partition, is_even, parts_at
from tests.commons.partition.drawn_workloads import WORKLOADS, homes, per_sample
from tests.commons.partition.every_function import Function, check_properties, problems_of
from tests.commons.partition.internals import loads
from tests.commons.partition.recorded_plans import checksum, problems

SAMPLES, CAP, SEEDS = 256, 8192, 20
pytestmark = pytest.mark.filterwarnings("ignore:samples .* have more than max_tokens")


def on_ranks(ranks):
    """The partition that micro-batches come from."""
    return [np.sort(np.concatenate(rank)) for rank in ranks]


def joined(ranks):
    return [samples for rank in ranks for samples in rank]


def check_ranks(workloads, tokens, ranks, cap, equal_size=False):
    """Every result: each sample once, the cap, the same number on every rank, the lightest first."""
    assert len({len(rank) for rank in ranks}) == 1
    micro_batches = joined(ranks)
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


@st.composite
def drawn_samples(draw):
    """(workloads, tokens, cap): caps from below the largest sample to far away."""
    workloads = draw(WORKLOADS)
    caps = st.sampled_from([1, 7, 30, 50, 51, 120, 10**6])
    return workloads, draw(per_sample(len(workloads))), draw(caps)


def drawn_histories(seed, hidden_size=128, longest=4096):
    """(FLOPs, tokens) of `SAMPLES` histories, most of them short and few very long."""
    lengths = np.rint(np.random.default_rng(seed).lognormal(5, 1.2, SAMPLES).clip(1, longest))
    tokens = 2 * lengths.astype(np.int64) + 1
    flops = HSTUFlops(num_layers=1, hidden_size=hidden_size, num_heads=1, head_dim=hidden_size)
    return flops.per_sample(tokens), tokens


def divided(workloads, tokens, partition, max_tokens):
    """The micro-batches into which plans divide the samples of each rank."""
    rank_of = number_of_part(partition, len(workloads))
    samples = check_samples(workloads, tokens, max_tokens)
    number, count = number_micro_batches(*samples, rank_of, len(partition))
    parts = indices_of_parts(rank_of * count + number, len(partition) * count)
    return [parts[start : start + count] for start in range(0, len(parts), count)]


def _tokens(workloads):
    return {"tokens": 1 + np.arange(len(workloads)) % 5, "max_tokens": 9}


FUNCTIONS = {
    "pack": Function(
        lambda workloads, home, parts, equal_size: pack_micro_batches(
            workloads, multiple_of=parts, **_tokens(workloads)
        ),
        parts_each=None,
    ),
    "divide": Function(
        lambda workloads, home, parts, equal_size: joined(
            divided(workloads, partition=parts_at(home, parts), **_tokens(workloads))
        ),
        parts_each=None,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_each_sample_once_whatever_the_unit(name, data):
    check_properties(FUNCTIONS[name], data.draw(problems_of(FUNCTIONS[name])))


@pytest.mark.parametrize("function", [pack_micro_batches, micro_batch_imbalance])
def test_wrong_arguments_are_named_and_their_kind_does_not_matter(function):
    check_wrong_arguments(function)
    check_kinds_of_arguments(function)


def test_plans_are_the_same_on_every_machine():
    ranks = []
    for workloads, parts, home_of, rng in problems():
        tokens = rng.integers(0, 50, len(workloads))
        ranks += divided(workloads, tokens, parts_at(home_of["anywhere"], parts), 200)
    assert checksum(ranks) == 2540305041
    packed = (
        pack_micro_batches(workloads, rng.integers(0, 50, len(workloads)), 200, multiple_of=2)
        for workloads, _, _, rng in problems()
    )
    assert checksum(packed) == 103655596


@given(drawn=drawn_samples(), multiple=st.integers(1, 4), fewest=st.integers(1, 12))
def test_pack_keeps_the_cap_with_few_micro_batches(drawn, multiple, fewest):
    workloads, tokens, cap = drawn
    micro_batches = pack_micro_batches(*drawn, multiple_of=multiple, min_count=fewest)
    check_ranks(workloads, tokens, [micro_batches], cap)
    count = len(micro_batches)
    assert count % multiple == 0 and count >= max(fewest, fewest_for(tokens, cap))
    assert count <= rounded_up(max(best_fit_decreasing(tokens, cap), fewest), multiple)
    assert sum(len(samples) > 0 for samples in micro_batches) == min(count, len(workloads))
    needed = len(pack_micro_batches(*drawn))
    assert multiple > 1 or count == max(needed, fewest)


@given(data=st.data(), drawn=drawn_samples(), num_ranks=st.integers(1, 5))
def test_divide_keeps_every_sample_on_its_rank(data, drawn, num_ranks):
    workloads, tokens, cap = drawn
    partition = parts_at(data.draw(homes(len(workloads), num_ranks, even=False)), num_ranks)
    ranks = divided(workloads, tokens, partition, cap)
    assert as_lists(on_ranks(ranks)) == as_lists(partition)
    check_ranks(workloads, tokens, ranks, cap)
    # The rank that needs most decides.
    of_ranks = [np.array(tokens, dtype=np.int64)[samples] for samples in partition]
    assert max(1, *(fewest_for(of_rank, cap) for of_rank in of_ranks)) <= len(ranks[0])
    assert len(ranks[0]) <= max(1, *(best_fit_decreasing(of_rank, cap) for of_rank in of_ranks))


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


def test_micro_batch_imbalance_adds_up_the_largest_of_every_step():
    assert micro_batch_imbalance([1, 2, 3, 10], [[[0], [1, 2]], [[], [3]]]) == (1 + 10) / 8
    assert micro_batch_imbalance([], [[[], []]] * 3) == 1
    assert micro_batch_imbalance([0, 0], [[[0]], [[1]]]) == 1


def test_a_cap_changes_nothing_where_it_is_far_away():
    (workloads, tokens), far = drawn_histories(0), 2**70
    expected = refined(workloads, 5, equal_size=False)
    packed = pack_micro_batches(workloads, tokens, far, min_count=5)
    assert imbalance(workloads, packed) <= imbalance(workloads, expected) * 1.01
    assert as_lists(pack_micro_batches(workloads, tokens, far)) == [list(range(SAMPLES))]


def test_samples_above_the_cap_are_alone_and_named_where_it_was_called():
    workloads, tokens = [3, 1, 4, 1, 5, 9], [2, 12, 3, 1, 30, 4]
    with pytest.warns(UserWarning, match=r"\[1, 4\] .* max_tokens=10 .*sample 4 has 30") as named:
        assert as_lists(pack_micro_batches(workloads, tokens, 10)) == [[1], [4], [0, 2, 3, 5]]
        divided(workloads, tokens, parts_at([0, 1] * 3, 2), 10)  # which names none
    assert [warning.filename for warning in named] == [__file__]


def test_corner_cases():
    assert as_lists([pack_micro_batches([], [], 5, min_count=2)]) == [[[], []]]
    for num_ranks in (1, 3):
        assert as_lists(divided([], [], [[]] * num_ranks, 5)) == [[[]]] * num_ranks
    assert as_lists(divided([0, 0], [9, 9], [[0, 1]], 5)) == [[[0], [1]]]
    packed = pack_micro_batches([0] * 4, [2] * 4, 4)  # what costs nothing is spread evenly
    assert [len(samples) for samples in packed] == [2, 2]
