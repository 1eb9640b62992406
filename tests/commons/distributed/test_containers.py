"""Batches that are no `BaseBatch`: dicts, TorchRec's `Batch`, TensorDicts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.distributed.shuffler_settings import EXCHANGE_NAMES
from commons.sequence_batch.rows import Rows
from tests.commons.distributed.container_batches import (
    KINDS,
    ContainerShuffler,
    check_shared,
    contents,
    make_batch,
)
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import DictShuffler, FieldShuffler
from tests.on_ranks import on_ranks


def check_shown(shown, batch) -> None:
    """`get_workloads` sees the host batch, with integers that do not wrap."""
    if isinstance(batch, dict):
        assert shown["jagged"].lengths().dtype == torch.int64
    assert type(shown) is type(batch) and contents(shown) == contents(batch)


def _move(kind: str, seed: int, rows: tuple[int, ...], exchange: str, equal_rows: bool):
    shuffler = ContainerShuffler(exchange=exchange, equal_rows=equal_rows)
    rank = dist.get_rank()
    shuffler.shuffle(make_batch(kind, seed, 0, 2))
    batch = make_batch(kind, seed, 1000 * (rank + 1), rows[rank])
    plan = shuffler.plan(batch)
    check_shown(shuffler.asked_about[-1], batch)
    moved = shuffler.exchange(batch, plan)
    check_shared(moved, batch)
    assert len(contents(moved)) == plan.num_rows[rank]
    real = int(plan.num_placed[rank])
    return contents(batch), plan.partition[rank], contents(moved)[:real], len(contents(moved))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_any_container_is_lost(pools, kind):
    pool = pools(3)

    @settings(max_examples=5, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        rows=st.one_of(
            st.integers(1, 5).map(lambda rows: (rows,) * 3),
            st.tuples(*[st.integers(1, 5)] * 3),
        ),
        exchange=st.sampled_from(sorted(EXCHANGE_NAMES)),
        equal_rows=st.booleans(),
    )
    def conserved(seed, rows, exchange, equal_rows):
        results = pool.run(_move, kind, seed, rows, exchange, equal_rows)
        every = [content for loaded, *_ in results for content in loaded]
        assert len(every) == sum(rows)
        assert Counter(every) == Counter(content for _, _, got, _ in results for content in got)
        for _, samples, got, num_rows in results:
            assert got == [every[sample] for sample in samples]
            assert num_rows == max(len(samples), 1)
            assert not equal_rows or len(samples) in (sum(rows) // 3, -(-sum(rows) // 3))

    conserved()


def _with_an_ended_loader(kind: str):
    shuffler = ContainerShuffler()
    rank = dist.get_rank()
    batch = make_batch(kind, 0, 10, 4) if rank == 0 else None
    plan = shuffler.plan(batch)
    brought = shuffler.padding_batch() if batch is None else batch
    moved = shuffler.exchange(brought, plan)
    assert type(moved) is type(shuffler.padding_batch())
    return [] if batch is None else contents(batch), contents(moved)[: plan.num_placed[rank]]


@pytest.mark.parametrize("kind", KINDS)
def test_any_container_where_one_rank_has_no_batch(pools, kind):
    (loaded, got), (nothing, got_elsewhere) = pools(2).run(_with_an_ended_loader, kind)
    assert nothing == [] and len(got_elsewhere) == 2
    assert Counter(got + got_elsewhere) == Counter(loaded)


class EvenShuffler(FieldShuffler):
    """Every row costs the rank's number: those of rank 1 have to move."""

    def get_workloads(self, batch):
        value = next(value for value in batch.values() if isinstance(value, torch.Tensor))
        return torch.full((value.shape[0],), dist.get_rank() * 10)


def _ids_under(keys: list, as_tensordict: bool) -> list[list[int]]:
    """Shuffles ids under each key, each time 100 larger; a string next to them stays."""
    ids = torch.arange(4) + 4 * dist.get_rank()
    batch = {key: ids + 100 * number for number, key in enumerate(keys)} | {"name": "train"}
    batch = TensorDict(batch, batch_size=[4]) if as_tensordict else batch
    moved = EvenShuffler().shuffle(batch)
    assert moved["name"] == "train"
    return [moved[key].tolist() for key in keys]


@pytest.mark.parametrize(
    ("keys", "as_tensordict"),
    [(["ids", 3], False), (["ids", ("user", "age")], False), (["user/age", ("user", "age")], True)],
)
def test_keys_need_not_be_names_and_may_look_like_paths(pools, keys, as_tensordict):
    results = pools(2).run(_ids_under, keys, as_tensordict)
    ids = [sample for result in results for sample in result[0]]
    assert sorted(ids) == list(range(8)) != ids
    assert [other for result in results for other in result[1]] == [sample + 100 for sample in ids]


def _error_of(batch) -> str:
    return error_of(EvenShuffler().plan, batch).partition("\n")[0]


KEYED = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"name": "train"}, "TypeError: dict has no rows to place; expected a BaseBatch"),
        ({}, "TypeError: dict has no rows to place"),
        (TensorDict({}, batch_size=[3]), "TypeError: tensordict._td.TensorDict has no rows to place"),
        ([3], "TypeError: list has no rows to place"),
        (
            {"ids": torch.arange(3), "keyed": KEYED},
            "ValueError: fields have different numbers of rows: {'ids': 3, 'keyed': 2}",
        ),
        (
            {"ids": torch.arange(3), "loss": torch.tensor(1.0)},
            "ValueError: loss is a tensor without rows (0-d); give it one row per sample",
        ),
    ],
)
def test_containers_without_rows_are_the_same_error_on_all_ranks(pools, batch, expected):
    errors = pools(2).run(_error_of, batch)
    assert errors[0] == errors[1]
    assert errors[0].startswith(expected)


def test_a_container_of_a_rank_alone_is_left_as_it_is():
    class Alone(BatchShuffler):
        def get_workloads(self, batch):
            return batch["ids"]

    batch = make_batch("dict", 0, 0, 3)
    assert Alone().shuffle(batch) is batch


@on_ranks(2)
def test_what_a_tensordict_holds_beside_tensors_travels_or_is_refused():
    ids, costs = torch.arange(4) + 4 * dist.get_rank(), torch.full((4,), 1 + 9 * dist.get_rank())
    batch = TensorDict({"ids": ids, "workload": costs}, batch_size=[4])
    batch.set_non_tensor("items", JaggedTensor(ids, lengths=torch.ones(4, dtype=torch.int64)))
    moved = DictShuffler().shuffle(batch)
    assert moved["ids"].tolist() != ids.tolist()
    assert moved["items"].values().tolist() == moved["ids"].tolist()
    batch.set_non_tensor("array", np.arange(4))
    with pytest.raises(TypeError, match=rf"array is a numpy\.ndarray, {STAYS}"):
        assert Rows(batch).fields


NESTED = torch.nested.nested_tensor_from_jagged(
    torch.arange(6), offsets=torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 1])
)
STAYS = "which would stay behind when its samples move"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of one of two layouts
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.arange(4), rf"more is a numpy\.ndarray, {STAYS}"),
        ([np.arange(4)], rf"more\[0\] is a numpy\.ndarray, {STAYS}"),
        ({"a b": object()}, rf"more\['a b'\] is a object, {STAYS}"),
        (
            NonTensorStack("a", "b"),
            r"more is a .*NonTensorStack, .* its values are not tensors, one for each row",
        ),
        (NESTED, "without holes"),
        (lambda: torch.nested.nested_tensor([torch.arange(2), torch.arange(3)]), r"layout torch\.jagged"),
    ],
)
def test_data_whose_rows_cannot_be_sent_is_refused(value, message):
    value = value() if callable(value) else value
    with pytest.raises(TypeError, match=message):
        assert Rows({"ids": torch.arange(4), "more": value}).fields
