"""Batches and shufflers on their samples: costs, tokens, loss tokens, labels, and shared fields."""

from __future__ import annotations

import logging
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.distributed import BatchShuffler
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch, containers

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
        assert f"so that labels have shape [batch_size, {len(labels) // 4}]" in error


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
    logging.getLogger("commons.distributed.plan_gather").addHandler(heard)
    lengths = torch.tensor([1, 2, 4])
    batch = {
        "ids": torch.arange(3),
        "history": JaggedTensor(torch.arange(7), lengths=lengths),
        "users": ["a", "b", "c"],
        "items": [[1, 2], [3], [4]],
        "longest": 4,
        "keys": ["x", "y"],
        "layers": 12,
    }
    shuffler = Costing(lambda batch: batch["ids"])
    batches = [batch] * 2 if dist.get_rank() else []  # rank 0 has none, and tells all the same
    for _, _ in shuffler.plan_ahead(batches):
        pass
    return heard.messages


def test_numbers_that_seem_to_be_about_the_rows_are_told_once(pools):
    on_rank_0, elsewhere = pools(2).run(_names_per_row)
    assert [message.split(",")[0] for message in on_rank_0] == [
        "users has length 3",
        "items has length 3",
        "longest is 4",
    ]
    assert elsewhere == []


@dataclass
class Doubling:
    ids: torch.Tensor

    def __post_init__(self) -> None:
        self.ids = self.ids * 2


@dataclass
class Widening:
    ids: torch.Tensor
    weights: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.ids = self.ids.long()  # changes nothing the second time
        self.weights = self.ids.float()


@dataclass
class OfSomethingElse:
    ids: torch.Tensor
    factor: InitVar[int] = 1

    def __post_init__(self, factor: int) -> None:
        self.ids = self.ids * factor


def _made(kind):
    ids = torch.arange(3, dtype=torch.int32) + 3 * dist.get_rank()
    try:
        moved = Costing(lambda batch: batch.ids.long()).shuffle(kind(ids))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if kind is Widening:
        assert torch.equal(moved.weights, moved.ids.float())
    return moved.ids.tolist()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Doubling, "ids changes when dataclasses.replace makes a"),
        (OfSomethingElse, "its __init__ takes something else than its fields"),
    ],
)
def test_dataclasses_that_change_when_made_again_are_refused(pools, kind, message):
    for error in pools(2).run(_made, kind):
        assert message in error and "register_batch_type" in error


def test_fields_that_post_init_makes_travel(pools):
    first, second = pools(2).run(_made, Widening)
    assert sorted(first + second) == list(range(6))


def _keyed(keys):
    batch = {"kt": KeyedTensor(list(keys[dist.get_rank()]), [1, 1], torch.zeros(2, 2))}
    return _error_of(lambda: batch, lambda batch: torch.ones(2, dtype=torch.int64))


def test_ranks_agree_on_the_keys_of_keyed_tensors(pools):
    assert pools(2).run(_keyed, ("ab", "ab")) == ["planned", "planned"]
    for error in pools(2).run(_keyed, ("ab", "ba")):
        assert "field 'kt(b: 1, a: 1)' is unexpected" in error or "field 'kt(a: 1, b: 1)' is missing" in error


def _unpicklable():
    batches = [{"ids": torch.arange(3), "call": lambda: 0}] if dist.get_rank() else []
    try:
        for _ in Costing(lambda batch: batch["ids"]).plan_ahead(batches):
            pass
    except TypeError as error:
        return str(error)
    return "planned"


def test_a_batch_that_cannot_be_sent_is_an_error_on_all_ranks(pools):
    for error in pools(2).run(_unpicklable):
        assert "a batch of rank 1 does not pickle" in error


def _worked_in_place():
    shuffler = Costing(lambda batch: batch["x"].long())
    rows = []
    for batch, plan in shuffler.plan_ahead([{"x": torch.ones(1)}] * 3 if dist.get_rank() else []):
        moved = shuffler.exchange(batch, plan)
        rows.append(moved["x"].tolist())
        moved["x"].mul_(1e30)
    return rows


def test_a_model_may_work_in_place_on_a_copied_row(pools):
    assert pools(2).run(_worked_in_place) == [[[1.0]] * 3] * 2


def test_tensordicts_keep_names_and_locks_and_change_device():
    batch = TensorDict({"n": TensorDict({"ids": torch.arange(4)}, [4])}, [4], names=["row"]).lock_()
    moved = containers.transformed(batch, lambda _, leaf: leaf[:3].to("meta"))
    assert moved.names == ["row"] and moved.is_locked and moved.batch_size == (3,)
    assert moved["n", "ids"].device.type == "meta"
    without_rows = TensorDict({"n": TensorDict({"ids": torch.arange(4)}, [])}, [])
    assert containers.moved_to(without_rows, torch.device("meta"))["n", "ids"].device.type == "meta"
