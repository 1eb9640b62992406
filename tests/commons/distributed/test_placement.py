"""The rank that gets each sample, and the limits that hold."""

import re
import reprlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commons.distributed import PARTITIONERS, ShufflerSettings
from commons.partition import rebalance
from tests.commons.distributed.compiled_kernels import before_and_after_placing
from tests.commons.distributed.internals import RowTable, place, place_rows, ranks_per_node, relative_speeds
from tests.commons.distributed.shufflers import LIMITED


def _place(loaded: RowTable, partitioner: str = "rebalance", **settings) -> list[np.ndarray]:
    plan = place(loaded, ShufflerSettings(partitioner, **settings))
    return list(plan.partition)


def _loaded(workloads, num_loaded, tokens=None) -> RowTable:
    workloads = np.asarray(workloads, dtype=np.int64)
    tokens = np.ones_like(workloads) if tokens is None else np.asarray(tokens, dtype=np.int64)
    rows = np.array(num_loaded)
    return RowTable(rows, rows, workloads, tokens, tokens, tokens[:, None], workloads, tokens[:, None])


def _tokens(loaded: RowTable, placed) -> list[int]:
    return [int(loaded.tokens[samples].sum()) for samples in placed]


def test_a_partitioner_gets_the_rows_and_the_settings():
    rng = np.random.default_rng(0)
    loaded = replace(
        _loaded(rng.lognormal(5, 1.2, 256).clip(1, 600), [32] * 8, rng.integers(1, 20, 256)),
        sample_bytes=rng.integers(1, 99, 256),
        speeds=1 - rng.random(8) / 9,
        ranks_per_node=4,
    )
    of_rows = {
        "sizes": loaded.sample_bytes,
        "tokens": loaded.tokens,
        "speeds": relative_speeds(loaded),
        "ranks_per_node": 4,
    }
    for chosen in (
        {"tolerance": 0.2},
        {"tolerance": 0.001, "token_tolerance": 0.01},
        {"equal_rows": False, "max_tokens": 400},
    ):
        options = {"token_tolerance": 0.1, **chosen, **of_rows}
        options["equal_size"] = options.pop("equal_rows", True)
        expected = rebalance(loaded.workloads, loaded.home, 8, **options)
        for samples, of_rank in zip(_place(loaded, **chosen), expected, strict=True):
            assert np.array_equal(samples, of_rank)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_samples_stay_where_load_and_tokens_are_no_worse(partitioner):
    workloads, tokens = [8, 8, 8, 8] * 16, [9, 5, 5, 1] * 16
    even = _loaded(workloads, [32, 32], tokens)
    order = np.argsort(tokens, kind="stable")
    uneven = _loaded(workloads, [32, 32], np.array(tokens)[order])
    as_loaded = np.split(np.arange(64), 2)
    for loaded, options in (
        (even, {}),
        (uneven, {"token_tolerance": None}),
        (uneven, {"token_tolerance": 2.0}),
    ):
        assert np.array_equal(_place(loaded, partitioner, **options), as_loaded)
    fewer = max(_tokens(uneven, _place(uneven, partitioner))) < max(_tokens(uneven, as_loaded))
    assert fewer == (partitioner in ("rebalance", "refined"))


def test_a_rank_that_exchanges_with_no_other_heeds_no_limit():
    loaded = _loaded(np.arange(2), [2], tokens=[9, 9])
    plan = place(loaded, ShufflerSettings(max_tokens=1))
    assert plan.rows is loaded and not plan.moves


def test_tokens_too_many_to_be_added_are_left_alone():
    loaded = _loaded([3, 1, 1, 1], [2, 2], [2**62, 2**62, 2**62, 1])
    assert [len(samples) for samples in _place(loaded)] == [2, 2]


def _of_user(returned):
    """Makes a partitioner that ignores what it is given, except in the warm-up, which has two samples."""

    def partition(workloads, num_partitions, equal_size=True, tokens=None, max_tokens=None):
        return [[0], [1]] if len(workloads) == 2 else returned

    return partition


UNEQUAL = [[0], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("returned", "limits", "fault"),
    [
        (UNEQUAL, {}, "parts of 1 to 7 samples, which may differ by at most one"),
        (UNEQUAL, {"equal_rows": False, "max_tokens": 5}, "a part of 7 tokens, above max_tokens=5"),
        ([[0, 1, 2, 3], [4, 5, 6, 6]], {}, "expected each of the 8 samples once"),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], {"equal_rows": False}, "1 parts, expected one for each of 2 ranks"),
        (np.zeros(7, dtype=np.int64), {}, "ranks of 7 rows, expected 8"),
        (np.arange(8) // 3, {}, "ranks from 0 to 2 of 2"),
        (None, {}, "'NoneType' object is not iterable"),
    ],
)
def test_a_users_partitioner_that_returns_something_wrong_is_named(monkeypatch, returned, limits, fault):
    monkeypatch.setitem(PARTITIONERS, "mine", _of_user(returned))
    expected = re.escape(f"partitioner 'mine' returned {reprlib.repr(returned)}: ") + ".*" + re.escape(fault)
    with pytest.raises(RuntimeError, match=expected):
        _place(_loaded([1] * 8, [4, 4]), "mine", **limits)


def test_a_sample_above_the_limit_is_named_by_rank_and_row():
    loaded = _loaded([1, 1, 1, 1, 1], [2, 3], tokens=[5, 5, 5, 77, 5])
    with pytest.raises(ValueError, match="row 1 of rank 1 has 77 tokens, above max_tokens=60"):
        _place(loaded, max_tokens=60)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a"] * 4, None),
        (["a", "a", "b", "b", "c", "c"], 2),
        (["a", "a", "a", "b"], 3),
        (["a", "b", "c", "d"], None),
        (["a", "a", "b", "c"], None),
        (["a", "a", "b", "b", "a", "a"], None),
    ],
)
def test_nodes_matter_where_each_has_the_same_number_of_consecutive_ranks(nodes, expected):
    assert ranks_per_node(nodes) == expected


# One swap makes room for another.
@example(seed=160730, partitioner="rebalance", equal_rows=False, slack=None)
@given(
    seed=st.integers(0, 10**6),
    partitioner=st.sampled_from(["rebalance", "refined", "longest_processing_time", "karmarkar_karp"]),
    equal_rows=st.booleans(),
    slack=st.sampled_from([None, 1.3]),
)
def test_each_rank_has_loss_tokens_where_one_swap_for_each_does(seed, partitioner, equal_rows, slack):
    rng = np.random.default_rng(seed)
    workloads = rng.integers(1, 20, 24)
    loss_tokens = (rng.random(24) < rng.choice([0.3, 0.9])).astype(np.int64) * rng.integers(1, 9, 24)
    tokens = rng.integers(1, 20, 24)
    loaded = replace(_loaded(workloads, [6] * 4, tokens), loss_tokens=loss_tokens)
    # With equal rows, a little more than the mean is needed, whatever the algorithm.
    most_tokens = None if slack is None or partitioner not in LIMITED else int(tokens.sum() / 4 * slack) + 20
    settings = ShufflerSettings(
        partitioner, equal_rows=equal_rows, token_tolerance=None, max_tokens=most_tokens
    )
    with_loss_everywhere = replace(loaded, loss_tokens=np.ones(24, dtype=np.int64))
    rank_of, without = (place_rows(rows, settings) for rows in (loaded, with_loss_everywhere))

    def is_allowed(placed: np.ndarray, most: float) -> bool:
        loads, held = (np.bincount(placed, weights, 4) for weights in (workloads, tokens))
        return loads.max() <= most and (most_tokens is None or held.max() <= most_tokens)

    sizes = np.bincount(rank_of, minlength=4)
    assert is_allowed(rank_of, np.bincount(without, workloads, 4).max())
    assert (sizes == np.bincount(without, minlength=4)).all() and (not equal_rows or np.ptp(sizes) == 0)
    counts = np.bincount(rank_of, loss_tokens > 0, 4)
    if (np.bincount(without, loss_tokens > 0, 4) > 0).all():
        assert (rank_of == without).all()
    for needy in np.flatnonzero((counts == 0) & (sizes > 0)):  # then no swap would do
        for giver in np.flatnonzero((loss_tokens > 0) & (counts[rank_of] > 1)):
            for taken in np.flatnonzero(rank_of == needy):
                swapped = rank_of.copy()
                swapped[[giver, taken]] = rank_of[[taken, giver]]
                assert not is_allowed(swapped, np.bincount(rank_of, workloads, 4).max())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"equal_rows": False, "max_tokens": 20_000},
        {"partitioner": "longest_processing_time", "max_tokens": 20_000},
        {"partitioner": "karmarkar_karp"},
        {"partitioner": "refined"},
    ],
)
def test_no_step_compiles(settings):
    """A shuffler compiles at its start all that its settings reach, and nothing that only others do."""
    before, after = before_and_after_placing(**settings)
    assert before == after and len(before) >= 3
    assert "_level" not in before and "_placed" not in before  # pieces and groups
    assert ("settle" in before) == ("partitioner" not in settings)
