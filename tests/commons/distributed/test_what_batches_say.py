"""What a batch, or its shuffler, says of samples: costs, tokens, loss tokens, labels, and what they share."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch

LENGTHS = (50_000, 70_000, 3_000, 1)  # the square of the first and of the second wraps in int32


def _long_histories() -> dict[str, Any]:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32).roll(dist.get_rank())
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    return {"ids": KeyedJaggedTensor(["item"], ids, lengths=lengths), "n": lengths}


class Costing(BatchShuffler):
    """Costs are a given function of the batch."""

    def __init__(self, cost, **settings: Any) -> None:
        self.get_workloads = cost  # type: ignore[method-assign]
        super().__init__(**settings)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError


def squared(batch):
    return batch["ids"].lengths() ** 2


def summed_squares(batch):
    return (batch["ids"].lengths().view(1, -1) ** 2).sum(0)


def flops(batch):
    return HSTUFlops(1, 32, 2, 16).per_sample(batch["ids"]["item"].lengths())


def _workloads(cost):
    return Costing(cost).plan(_long_histories()).workloads.tolist()


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (squared, [n**2 for n in LENGTHS]),
        (summed_squares, [n**2 for n in LENGTHS]),
        (flops, [10 * 32 * 32 * n + 4 * 32 * n**2 for n in LENGTHS]),
    ],
)
def test_costs_of_int32_lengths_do_not_wrap(pools, cost, expected):
    for workloads in pools(2).run(_workloads, cost):
        assert workloads == expected + expected[-1:] + expected[:-1]


def in_int32(batch):
    return batch["n"] ** 2


def _error_of(make, cost=squared, **settings):
    try:
        Costing(cost, **settings).plan(make())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "planned"


def test_costs_in_int32_are_refused(pools):
    for error in pools(2).run(_error_of, _long_histories, in_int32):
        assert "returned torch.int32, in which squares and FLOPs wrap without a word" in error


class Tokens(Costing):
    def get_tokens(self, batch):
        return batch["n"].long()

    def get_loss_tokens(self, batch):
        return batch["n"].long() - 1


def _tokens():
    plan = Tokens(squared).plan(_long_histories())
    return plan.tokens.tolist(), plan.loss_tokens.tolist()


def test_a_shuffler_says_what_a_foreign_batch_cannot(pools):
    expected = [*LENGTHS, *LENGTHS[-1:], *LENGTHS[:-1]]
    for tokens, loss_tokens in pools(2).run(_tokens):
        assert tokens == expected and loss_tokens == [n - 1 for n in expected]


def _incomplete(labels: torch.Tensor, rows: int = 8, real: int = 4) -> BaseBatch:
    lengths = torch.cat([torch.ones(real), torch.zeros(rows - real)]).int()
    features = KeyedJaggedTensor(["item"], torch.zeros(real, dtype=torch.int64), lengths=lengths)
    return BaseBatch(features, rows, {"item": 1}, labels=labels, actual_batch_size=real)


@pytest.mark.parametrize("labels", [torch.arange(8.0), torch.arange(12.0), torch.arange(4.0)])
def test_flat_labels_without_padding_are_refused(pools, labels):
    for error in pools(2).run(_flat_labels_error, labels):
        assert f"labels has {len(labels)} elements, as it seems of 4 samples" in error
        assert f"[batch_size, -1] = [8, {len(labels) // 4}]" in error


def _flat_labels_error(labels):
    try:
        _incomplete(labels)
    except ValueError as error:
        return str(error)
    return "made"


@pytest.mark.parametrize("padding", [0.0, -100.0])
@pytest.mark.parametrize("width", [1, 2])
def test_flat_labels_with_padding_travel(padding, width):
    labels = torch.cat([torch.arange(4.0 * width), torch.full((4 * width,), padding)])
    selected = _incomplete(labels).index_select([3, 1])
    assert selected.labels.view(2, width).tolist() == labels.view(8, width)[[3, 1]].tolist()


class Batch:
    """Named as TorchRec's, and another."""


@dataclass
class Shared:
    ids: torch.Tensor
    rate: torch.Tensor
    marked: torch.Tensor = field(metadata={"per_sample": False})


class Sharing(BatchShuffler):
    shared_fields = ("rate",)

    def get_workloads(self, batch):
        return batch.ids


class Misspelt(Sharing):
    shared_fields = ("rates",)


def _shared(shuffler):
    rank = dist.get_rank()
    batch = Shared(torch.arange(3) + 3 * rank, torch.tensor(0.5), torch.arange(3))
    try:
        moved = shuffler().shuffle(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert moved.rate is batch.rate and moved.marked is batch.marked
    return moved.ids.tolist()


def test_what_all_samples_share_is_named_by_the_shuffler(pools):
    results = pools(2).run(_shared, Sharing)
    assert sorted(results[0] + results[1]) == list(range(6))
    for error in pools(2).run(_shared, Misspelt):
        assert error.startswith(
            "ValueError: shared_fields names 'rates', which is not in the batch; there are"
        )


def _of_another_type():
    """Rank 1 has padding rows, rank 0 cannot tell."""
    ids = KeyedJaggedTensor(["item"], torch.arange(2), lengths=torch.ones(2).int())
    return {"features": ids} if dist.get_rank() == 0 else BaseBatch(ids, 2, {"item": 1})


def _changing_type():
    shuffler = Costing(lambda batch: next(iter(batch.values())).lengths())
    jagged = JaggedTensor(torch.arange(2), lengths=torch.ones(2).int())
    shuffler.plan({"x": jagged})
    try:
        shuffler.plan([jagged])
    except TypeError as error:
        return str(error)
    return "planned"


def test_types_that_differ_are_told_on_all_ranks(pools):
    for error in pools(2).run(_error_of, _of_another_type, of_any):
        assert "batches of rank 0 and rank 1 are of different types" in error
    for error in pools(2).run(_changing_type):
        assert error == "a batch is a list, and the first was a dict; all must be of one type"


def of_any(batch):
    features = batch["features"] if isinstance(batch, dict) else batch.features
    return features.lengths()


def _foreign_batch():
    return Batch()


def test_another_class_of_that_name_is_named_with_its_module(pools):
    for error in pools(2).run(_error_of, _foreign_batch):
        assert error.startswith(f"TypeError: {Batch.__module__}.Batch has no rows to place")
        assert "register_batch_type" in error


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _names_per_row():
    heard = Heard()
    logging.getLogger("commons.distributed.batch_shuffler").addHandler(heard)
    shuffler = Costing(lambda batch: batch["ids"])
    for _ in range(2):
        shuffler.plan({"ids": torch.arange(3), "users": ["a", "b", "c"], "keys": ["x", "y"]})
    return heard.messages


def test_a_list_with_a_value_for_each_row_is_told_once(pools):
    on_rank_0, elsewhere = pools(2).run(_names_per_row)
    assert len(on_rank_0) == 1 and on_rank_0[0].startswith("users has as many values as the batch has rows")
    assert elsewhere == []
