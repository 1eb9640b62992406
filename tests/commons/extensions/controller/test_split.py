"""A global batch in one process, split for workers and put together again; no process group anywhere."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler, BatchShufflerFactory, Extension, register_batch_shuffler
from commons.extensions.controller import SplitOrder, merge, split_balanced
from commons.partition import imbalance, loads, refined
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.rows import Rows
from tests.commons.distributed.container_batches import KINDS, contents, make_batch
from tests.commons.distributed.loaded_batches import check_identical, outputs_of
from tests.drawn_batches import draw_batch, sample_contents, tensors_of

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
    kind = draw(st.sampled_from(["mixed", *KINDS]))
    num_real, num_padding = draw(st.integers(0, 12)), draw(st.integers(0, 3))
    if kind == "mixed":
        labels = draw(st.sampled_from(LABELS))
        batch = draw_batch(rng, 100, max(num_real + num_padding, 1), num_real, labels)
    else:
        batch = make_batch(kind, int(rng.integers(10**6)), 100, num_real)
    workloads = rng.integers(0, 100, num_real) * rng.integers(0, 3, num_real)
    return Case(batch, num_real, workloads, draw(st.integers(1, 15)))


def samples_in(batch: Any, num_real: int) -> list[tuple]:
    """For each real row, everything that belongs to it, comparable."""
    return sample_contents(batch) if isinstance(batch, BaseBatch) else contents(batch)[:num_real]


def check_same(got: Any, expected: Any) -> None:
    if isinstance(expected, TorchRecBatch):
        assert type(got) is TorchRecBatch
        got, expected = vars(got), vars(expected)
    check_identical(got, expected)


def check_chunks(case: Case, chunks: list[Any], order: SplitOrder) -> None:
    """All of each sample is in one chunk, in order; only a `BaseBatch` has padding, to equal rows."""
    assert len(chunks) == len(order.partition) == case.num_chunks
    assert sorted(np.concatenate(order.partition).tolist()) == list(range(case.num_real))
    every = samples_in(case.batch, case.num_real)
    got = []
    for chunk, samples in zip(chunks, order.partition, strict=True):
        assert type(chunk) is type(case.batch)
        assert samples.tolist() == sorted(samples)
        is_padded = isinstance(chunk, BaseBatch)
        most = max(1, order.num_samples.max())
        assert Rows(chunk).num_rows == (most if is_padded else len(samples))
        if is_padded:
            assert chunk.num_samples == len(samples)
            assert chunk.shared is case.batch.shared
            check_padding(chunk, len(samples))
        of_chunk = samples_in(chunk, len(samples))
        assert of_chunk == [every[sample] for sample in samples]
        got += of_chunk
    assert Counter(got) == Counter(every)


def check_padding(batch: BaseBatch, num_real: int) -> None:
    for value in batch.per_sample_fields().values():
        of_rows = value if isinstance(value, torch.Tensor) else value.lengths().view(-1, batch.batch_size).T
        assert not of_rows[num_real:].any()


@settings(max_examples=50, deadline=None)
@given(case=cases(), as_pickled=st.booleans())
def test_merge_undoes_split_and_nothing_is_lost(case, as_pickled):
    assert not dist.is_initialized()
    chunks, order = split_balanced(case.batch, case.num_chunks, case.workloads)
    check_chunks(case, chunks, order)
    assert order.batch_size == Rows(case.batch).num_rows
    assert np.ptp(order.num_samples) <= 1
    best = refined(case.workloads, case.num_chunks)
    assert imbalance(case.workloads, order.partition) == imbalance(case.workloads, best)
    if as_pickled:
        chunks, order = pickle.loads(pickle.dumps((chunks, order)))
    check_same(merge(chunks, order), case.batch)


@settings(max_examples=20, deadline=None)
@given(case=cases(), data=st.data(), kind=st.sampled_from(["integers", "strings", "array", "tensor"]))
def test_groups_stay_together(case, data, kind):
    labels = data.draw(st.lists(st.integers(0, 4), min_size=case.num_real, max_size=case.num_real))
    groups = {
        "integers": labels,
        "strings": [f"prompt {label}" for label in labels],
        "array": np.array(labels, dtype=np.int32),
        "tensor": torch.tensor(labels, dtype=torch.int64),
    }[kind]
    chunks, order = split_balanced(case.batch, case.num_chunks, case.workloads, groups)
    check_chunks(case, chunks, order)
    chunk_of = {}
    for chunk, samples in enumerate(order.partition):
        for sample in samples:
            assert chunk_of.setdefault(labels[sample], chunk) == chunk
    check_same(merge(chunks, order), case.batch)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 12),
    group_size=st.integers(1, 4),
    num_chunks=st.integers(1, 14),
)
def test_groups_of_one_size_are_spread_evenly_and_as_balanced_as_refined(
    seed, num_groups, group_size, num_chunks
):
    rng = np.random.default_rng(seed)
    group_of = rng.permutation(np.arange(num_groups).repeat(group_size))
    workloads = rng.integers(0, 1000, len(group_of))
    batch = {"ids": torch.arange(len(group_of))}
    _, order = split_balanced(batch, num_chunks, workloads, group_of)
    assert max(order.chunk_rows) == -(-num_groups // num_chunks) * group_size
    assert np.ptp(order.num_samples) <= group_size
    in_order = list(dict.fromkeys(group_of.tolist()))
    of_groups = np.array([workloads[group_of == group].sum() for group in in_order])
    best = loads(of_groups, refined(of_groups, num_chunks))
    assert loads(workloads, order.partition).tolist() == best.tolist()


def test_groups_of_several_sizes_follow_the_load():
    batch, workloads = {"ids": torch.arange(1, 6)}, [3, 3, 2, 2, 2]
    chunks, order = split_balanced(batch, 2, workloads, ["a", "a", "b", "c", "d"])
    assert order.num_samples.tolist() == [2, 3] and order.chunk_rows == (2, 3)
    assert [chunk["ids"].tolist() for chunk in chunks] == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("kind", ["dict", "tensordict"])
@pytest.mark.parametrize("num_samples", [6, 3])
def test_chunks_that_cannot_mark_padding_have_none(kind, num_samples):
    values = torch.arange(num_samples)
    batch = {"ids": values} if kind == "dict" else TensorDict({"ids": values}, batch_size=[num_samples])
    chunks, order = split_balanced(batch, 4, [1] * num_samples)
    assert sorted(sample for chunk in chunks for sample in chunk["ids"].tolist()) == values.tolist()
    assert [len(chunk["ids"]) for chunk in chunks] == order.num_samples.tolist()
    merged = merge([{"doubled": 2 * chunk["ids"]} for chunk in chunks], order)
    assert torch.equal(merged["doubled"], 2 * values)


def test_what_groups_are_called_does_not_matter():
    rng = np.random.default_rng(0)
    group_of = rng.integers(0, 8, 40)
    orders = []
    for _ in range(5):
        names = np.array([rng.bytes(8).hex() for _ in range(8)], dtype=object)
        orders.append(split_balanced({"ids": torch.arange(40)}, 3, [1] * 40, names[group_of])[1])
    orders.append(split_balanced({"ids": torch.arange(40)}, 3, [1] * 40, (7 - group_of).tolist())[1])
    for order in orders[1:]:
        for samples, expected in zip(order.partition, orders[0].partition, strict=True):
            assert samples.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["mixed", *KINDS])
@pytest.mark.parametrize("num_real", [1, 40])
def test_each_chunk_owns_its_memory(kind, num_real):
    if kind == "mixed":
        batch = draw_batch(np.random.default_rng(0), 0, 41, num_real, "flat")
    else:
        batch = make_batch(kind, 0, 0, num_real)
    chunks, _ = split_balanced(batch, 8, np.ones(num_real))
    for chunk in [*chunks, *pickle.loads(pickle.dumps(chunks))]:
        tensors = tensors_of(chunk)
        assert len(tensors) >= len(Rows(batch).fields)
        for tensor in tensors:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def ids_of(chunk: Any, samples: np.ndarray) -> list[int]:
    """Returns the contents of a chunk's real rows, drawn from sample 0 on."""
    dense = chunk.matrix[:, 0, 0] if isinstance(chunk, BaseBatch) else chunk["ids"]
    return dense.long().tolist()[: len(samples)]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_real=st.integers(0, 12),
    num_padding=st.integers(0, 3),
    num_chunks=st.integers(1, 6),
    junk=st.booleans(),
)
def test_results_of_the_chunks_are_merged_whatever_is_in_their_padding(
    seed, num_real, num_padding, num_chunks, junk
):
    batch = draw_batch(np.random.default_rng(seed), 0, max(num_real + num_padding, 1), num_real)
    chunks, order = split_balanced(batch, num_chunks, batch.workload)
    results = [
        outputs_of(ids_of(chunk, samples), num_rows - len(samples), junk)
        for chunk, samples, num_rows in zip(chunks, order.partition, order.chunk_rows, strict=True)
    ]
    expected = outputs_of(list(range(num_real)), batch.batch_size - num_real)
    check_identical(merge(results, order), expected)


def test_changed_chunks_are_merged():
    batch = make_batch("dict", 0, 0, 10)
    chunks, order = split_balanced(batch, 3, torch.arange(10))
    for chunk in chunks:
        chunk["dense"] *= 2
        chunk["scores"] = chunk["ids"] + 0.5
    merged = merge(chunks, order)
    assert torch.equal(merged.pop("scores"), torch.arange(10) + 0.5)
    check_identical(merged, {**batch, "dense": 2 * batch["dense"]})


def test_results_without_jagged_fields_are_merged():
    _, order = split_balanced({"ids": torch.arange(5)}, 2, [5, 1, 1, 1, 2])
    scores = [torch.tensor(samples) for samples in order.partition]
    merged = merge([{"scores": of_chunk} for of_chunk in scores], order)
    assert merged["scores"].tolist() == list(range(5))
    assert merge(scores, order).tolist() == list(range(5))


class TokenShuffler(BatchShuffler):
    """Long histories cost more."""

    def get_workloads(self, batch):
        if isinstance(batch, dict):
            return batch["jagged"].lengths().long() ** 2
        costs = batch.num_tokens() ** 2
        costs[batch.num_samples :] = -1  # padding rows cost what they like
        return costs


@pytest.mark.parametrize("kind", ["mixed", "dict"])
def test_a_registered_shuffler_says_what_samples_cost(kind):
    batch = make_batch("dict", 0, 0, 20)
    if kind == "mixed":
        batch = draw_batch(np.random.default_rng(0), 0, 24, 20)
    register_batch_shuffler("tokens")(TokenShuffler)
    try:
        shuffler = BatchShufflerFactory.create("tokens")
    finally:
        BatchShufflerFactory.unregister("tokens")
    assert not dist.is_initialized()
    chunks, order = split_balanced(batch, 4, shuffler)
    expected = refined(shuffler.get_workloads(batch)[:20].numpy(), 4)
    assert list(map(list, order.partition)) == list(map(list, expected))
    check_identical(merge(chunks, order), batch)


class ToldGroups(Extension):
    """Reads the prompt of each row; below 0 it has none."""

    name, order = "told_groups", 1

    def columns(self, batch):
        if isinstance(batch, dict):
            return {"groups": batch["prompt"]}
        prompt = batch.features["prompt"]
        groups = torch.full((batch.batch_size,), -1)
        groups[prompt.lengths() > 0] = prompt.values()
        return {"groups": groups}


@settings(max_examples=20, deadline=None)
@given(
    prompts=st.lists(st.integers(-3, 4), min_size=1, max_size=20),
    num_chunks=st.integers(1, 6),
    by_feature=st.booleans(),
)
def test_the_groups_of_a_shuffler_are_those_given_and_lone_samples_have_their_own(
    prompts, num_chunks, by_feature
):
    lengths = torch.arange(len(prompts)) % 4 + 1
    values = torch.arange(int(lengths.sum()))
    if by_feature:
        given = torch.tensor(prompts, dtype=torch.int64)
        keyed = KeyedJaggedTensor(
            ["item", "prompt"],
            torch.cat([values, given[given >= 0]]),
            lengths=torch.cat([lengths, (given >= 0).long()]),
        )
        batch = BaseBatch(keyed, len(prompts), {"item": 4, "prompt": 1})
    else:
        batch = {"jagged": JaggedTensor(values, lengths=lengths), "prompt": torch.tensor(prompts)}
    shuffler = TokenShuffler(extensions=[ToldGroups()])
    labels = [f"alone {row}" if prompt < 0 else f"prompt {prompt}" for row, prompt in enumerate(prompts)]
    chunks, order = split_balanced(batch, num_chunks, shuffler)
    _, expected = split_balanced(batch, num_chunks, shuffler, labels)
    assert list(map(list, order.partition)) == list(map(list, expected.partition))
    check_same(merge(chunks, order), batch)
    _, apart = split_balanced(batch, num_chunks, shuffler, list(range(len(prompts))))
    assert np.ptp(apart.num_samples) <= 1  # given groups replace the shuffler's


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


class WrongShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return torch.tensor([1.0, 2.5, 3.0])


HOLES = JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 1, 1]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_chunks": 0}, ValueError, "num_chunks is 0, expected a whole number of at least 1"),
        ({"num_chunks": 1.5}, ValueError, "num_chunks is 1.5, expected a whole number of at least 1"),
        ({"workloads": [1, 2]}, ValueError, r"workloads has shape \(2,\), expected one for each of 3"),
        ({"workloads": np.ones((3, 1))}, ValueError, r"workloads has shape \(3, 1\)"),
        ({"workloads": 7}, ValueError, r"workloads has shape \(\)"),
        ({"workloads": [1, float("nan"), 2]}, ValueError, r"workloads\[1\] is nan, expected a finite"),
        ({"workloads": [1, 2, -3]}, ValueError, r"workloads\[2\] is -3.0, expected a finite number"),
        (
            {"workloads": TokenShuffler},
            TypeError,
            "workloads are of type ABCMeta; expected one number per row",
        ),
        ({"workloads": WrongShuffler()}, ValueError, "WrongShuffler.get_workloads returned 2.5"),
        ({"groups": ["a", "b"]}, ValueError, r"groups has shape \(2,\), expected one for each of 3"),
        ({"groups": [0, 1, 0.5]}, TypeError, r"groups\[2\] is 0.5, expected an integer or a string"),
        ({"groups": np.ones((3, 2))}, TypeError, r"groups\[0\] is \[1.0, 1.0\], expected an integer"),
        ({"batch": "three"}, TypeError, "str has no rows to place"),
        ({"batch": {"jagged": HOLES}}, ValueError, "field 'jagged' has 5 values, its lengths"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    for groups in (None, ["a", "b", "a"]):
        batch = {"ids": torch.arange(3)}
        right = {"batch": batch, "num_chunks": 2, "workloads": [1, 2, 3], "groups": groups}
        with pytest.raises(error, match=message):
            split_balanced(**{**right, **arguments})


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([{"x": torch.zeros(2)}], ValueError, "merge got 1 batches, expected one for each of 2 chunks"),
        ([{"x": torch.zeros(1)}, {"x": torch.zeros(1)}], ValueError, "batch 1 has 1 rows, expected 2"),
        (
            [{"x": torch.zeros(1)}, {"x": torch.zeros(2).half()}],
            ValueError,
            "batches 0 and 1 differ: field 'x' has dtype torch.float16, expected torch.float32",
        ),
        ([{"x": torch.zeros(1)}, {"y": torch.zeros(2)}], ValueError, "differ: field 'x' is missing"),
        ([[0.0, 0.0], [0.0, 0.0]], TypeError, "list has no rows to place"),
    ],
)
def test_batches_that_are_no_chunks_are_refused(batches, error, message):
    _, order = split_balanced({"ids": torch.arange(3)}, 2, [1, 2, 3])
    with pytest.raises(error, match=message):
        merge(batches, order)
