"""A global batch in one process, split for workers and put together again; no process group anywhere."""

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.distributed import BatchShuffler, Extension
from commons.extensions.controller import merge, split_balanced
from commons.extensions.controller.split import SplitOrder
from commons.partition import imbalance, refined
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.container_batches import KINDS, MORE_KINDS, check_shared, contents, make_batch
from tests.commons.distributed.loaded_batches import (
    check_identical,
    expected_outputs,
    model_outputs,
    sample_ids,
)
from tests.commons.partition.checks import as_lists, part_of
from tests.drawn_batches import draw_batch
from tests.few_examples import few_examples

LABELS = ["keyed", "dense", "flat", "none"]


@dataclass(frozen=True)
class Case:
    """A batch, what its samples cost, and chunks to make of it."""

    batch: Any
    num_real: int
    workloads: np.ndarray
    num_chunks: int


@st.composite
def cases(draw) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["mixed", *KINDS, *MORE_KINDS]))
    num_real, num_padding = draw(st.integers(0, 12)), draw(st.integers(0, 3))
    assume(kind == "mixed" or num_real != 2)  # or the two limits of a dict would be of its rows
    if kind == "mixed":
        labels = draw(st.sampled_from(LABELS))
        batch = draw_batch(rng, 100, max(num_real + num_padding, 1), num_real, labels)
    else:
        batch = make_batch(kind, int(rng.integers(10**6)), 100, num_real)
    workloads = rng.integers(0, 100, num_real) * rng.integers(0, 3, num_real)
    return Case(batch, num_real, workloads, draw(st.integers(1, 15)))


def check_chunks(case: Case, chunks: list[Any], order: SplitOrder) -> None:
    """Checks that each sample is in one chunk, in order. Only a `BaseBatch` has padding, to equal rows."""
    assert len(chunks) == len(order.partition) == case.num_chunks
    assert sorted(np.concatenate(order.partition).tolist()) == list(range(case.num_real))
    every = contents(case.batch)
    for chunk, samples in zip(chunks, order.partition, strict=True):
        check_shared(chunk, case.batch)
        assert samples.tolist() == sorted(samples)
        assert contents(chunk) == [every[sample] for sample in samples]
        if isinstance(chunk, BaseBatch):
            assert chunk.batch_size == max(1, order.num_samples.max())


NAMES = {
    "integers": list,
    "strings": lambda labels: [f"prompt {label}" for label in labels],
    "array": lambda labels: np.array(labels, dtype=np.int32),
    "numpy integers": lambda labels: list(np.array(labels)),
    "array of strings": lambda labels: np.array([f"prompt {label}" for label in labels]),
    "tensor": lambda labels: torch.tensor(labels, dtype=torch.int64),
}


@given(case=cases(), as_pickled=st.booleans(), data=st.data(), names=st.none() | st.sampled_from(list(NAMES)))
def test_merge_undoes_split_nothing_is_lost_and_groups_stay_together(case, as_pickled, data, names):
    assert not dist.is_initialized()
    groups = None
    if names is not None:
        labels = data.draw(st.lists(st.integers(-2, 2), min_size=case.num_real, max_size=case.num_real))
        groups = NAMES[names](labels)
    chunks, order = split_balanced(case.batch, case.num_chunks, case.workloads, groups)
    check_chunks(case, chunks, order)
    if as_pickled:
        chunks, order = pickle.loads(pickle.dumps((chunks, order)))
    if groups is None:
        best = refined(case.workloads, case.num_chunks)
        assert np.ptp(order.num_samples) <= 1
        assert imbalance(case.workloads, order.partition) == imbalance(case.workloads, best)
    else:
        chunk_of = part_of(order.partition)
        assert all(len(set(chunk_of[np.array(labels) == label])) <= 1 for label in range(-2, 3))
    check_identical(merge(chunks, order), case.batch)


@few_examples
@given(
    seed=st.integers(0, 10**6),
    num_real=st.integers(0, 12),
    num_padding=st.integers(0, 3),
    num_chunks=st.integers(1, 6),
)
def test_results_of_the_chunks_are_merged_whatever_is_in_their_padding(
    seed, num_real, num_padding, num_chunks
):
    batch = draw_batch(np.random.default_rng(seed), 0, max(num_real + num_padding, 1), num_real)
    chunks, order = split_balanced(batch, num_chunks, batch.workload)
    results = [model_outputs(chunk, padded=True) for chunk in chunks]
    for result, chunk in zip(results, chunks, strict=True):
        numbers = [*sample_ids(chunk), *[99] * (chunk.batch_size - chunk.num_samples)]
        result["arrays"] = np.array(numbers), np.array(numbers, dtype=object)
    merged, padding = merge(results, order), batch.batch_size - num_real
    integers, objects = merged.pop("arrays")
    assert integers.tolist() == [*range(num_real), *[0] * padding]
    assert objects.tolist() == [*range(num_real), *[None] * padding]
    check_identical(merged, expected_outputs(batch))


class TokenShuffler(BatchShuffler):
    def get_workloads(self, batch):
        if isinstance(batch, dict):
            return batch["jagged"].lengths().long() ** 2
        costs = batch.num_tokens() ** 2
        costs[batch.num_samples :] = -1  # padding rows cost what they like
        return costs


class ToldGroups(Extension):
    """Reads the group of each row off its number; below 0 it has none."""

    name, order = "told_groups", 1

    def columns(self, batch):
        numbers = batch["ids"] if isinstance(batch, dict) else batch.small.long()
        return {"groups": numbers % 7 - 3}


@pytest.mark.parametrize("kind", ["mixed", "dict"])
def test_a_shuffler_says_what_samples_cost_and_their_groups(kind):
    shuffler = TokenShuffler(extensions=[ToldGroups()])
    alone = list(range(20))
    labels = [f"alone {row}" if row % 7 < 3 else f"group {row % 7}" for row in alone]
    for seed in range(6):
        batch = make_batch("dict", seed, 0, 20)
        if kind == "mixed":
            batch = draw_batch(np.random.default_rng(seed), 0, 23, 20)
        costs = shuffler.get_workloads(batch)[:20].numpy()
        chunks, order = split_balanced(batch, seed + 1, shuffler)
        _, expected = split_balanced(batch, seed + 1, costs, labels)
        assert as_lists([*order.partition]) == as_lists([*expected.partition])
        check_identical(merge(chunks, order), batch)
        _, apart = split_balanced(batch, seed + 1, shuffler, alone)  # given groups replace the shuffler's
        assert as_lists([*apart.partition]) == as_lists(refined(costs, seed + 1))


def learned(costs: list[float]) -> torch.Tensor:
    return torch.tensor(costs, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("as_given", [list, np.array, torch.tensor, learned])
def test_workloads_and_groups_of_all_rows_or_of_the_real_ones(as_given):
    batch = draw_batch(np.random.default_rng(0), 0, 6, 4)
    costs = [4.0, 1.0, 2.5, 2.0]
    for workloads in (as_given(costs), as_given([*costs, -1.0, float("nan")])):
        _, order = split_balanced(batch, 2, workloads)
        assert sorted(samples.tolist() for samples in order.partition) == [[0, 1], [2, 3]]
        for groups in ([0, 1, 0, 1], [0, 1, 0, 1, None, 0.5]):
            _, order = split_balanced(batch, 2, workloads, groups)
            assert sorted(samples.tolist() for samples in order.partition) == [[0, 2], [1, 3]]


HOLES = JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 1, 1]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_chunks": 0}, ValueError, "num_chunks is 0"),
        ({"workloads": [1, 2]}, ValueError, r"workloads has shape \(2,\), expected one for each of 3"),
        ({"workloads": [1, float("nan"), 2]}, ValueError, r"workloads\[1\] is nan, expected a finite"),
        ({"workloads": torch.ones(3).int()}, ValueError, r"workloads is of int32, .* overflow"),
        ({"workloads": TokenShuffler}, TypeError, "must be a string or a real number"),
        ({"groups": [0, 1, 0.5]}, TypeError, r"groups\[2\] is 0.5, expected an integer or a string"),
        ({"groups": "abc"}, TypeError, "groups is 'abc'"),
        ({"batch": "three"}, TypeError, "str has no rows to place"),
        ({"batch": {"jagged": HOLES}}, ValueError, "field 'jagged' has 5 values, its lengths"),
        ({"batch": {"x": np.ma.array([1, 2, 3], mask=[0, 1, 0])}}, TypeError, "MaskedArray, .* stay behind"),
        (
            {"batch": {"ids": torch.arange(3), "names": np.array(["a", "b"])}},
            ValueError,
            "fields have different numbers of rows: .*'names .array.': 2",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    right = {"batch": {"ids": torch.arange(3)}, "num_chunks": 2, "workloads": [1, 2, 3]}
    with pytest.raises(error, match=message):
        split_balanced(**{**right, **arguments})


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([{"x": torch.zeros(2)}], ValueError, "zip"),
        ([{"x": torch.zeros(1)}, {"x": torch.zeros(1)}], ValueError, "batch 1 has 1 rows, expected 2"),
        ([{"x": torch.zeros(1)}, {"y": torch.zeros(2)}], ValueError, "differ: field 'x' is missing"),
        ([[0.0, 0.0], [0.0, 0.0]], TypeError, "list has no rows to place"),
        ([{"x": torch.zeros(1), "a": torch.tensor(1.0)}] * 2, ValueError, "'a', a tensor without rows"),
        (
            [{"x": torch.zeros(rows), "log": ["worker"] * (6 + rows)} for rows in (1, 2)],
            ValueError,
            "batches 0 and 1 differ in 'log', which does not have an entry for each",
        ),
    ],
)
def test_batches_that_are_no_chunks_are_refused(batches, error, message):
    _, order = split_balanced({"ids": torch.arange(3)}, 2, [1, 2, 3])
    with pytest.raises(error, match=message):
        merge(batches, order)
