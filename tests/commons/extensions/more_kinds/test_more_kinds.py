"""TensorDicts, KeyedTensors, nested and memory-mapped tensors travel with their samples, or are refused."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import MemoryMappedTensor, NonTensorStack, TensorDict, tensorclass
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import commons.extensions.more_kinds  # noqa: F401  for its effect
from commons.sequence_batch import BaseBatch, register_batch_type
from tests.commons.distributed.container_batches import MORE_KINDS, ContainerShuffler, contents, make_batch
from tests.commons.distributed.errors_and_warnings import error_of_all
from tests.commons.distributed.field_kinds import (
    MORE_CONTAINERS,
    ROWS,
    HeavyOnRank1,
    check_some_moved,
    check_travels,
    every_kind_and_more,
    held,
    ids_of,
    naming,
    own_ids,
)
from tests.commons.distributed.loaded_batches import BOTH, check_identical
from tests.commons.sequence_batch.internals import Rows
from tests.on_ranks import on_ranks

IDS, ONES = torch.arange(ROWS), torch.ones(ROWS, dtype=torch.int64)


@pytest.mark.parametrize("exchange", BOTH)
@on_ranks(2)
def test_every_kind_of_field_travels_with_its_row_in_any_container(exchange: str):
    for container, make in MORE_CONTAINERS.items():
        with naming(container):
            check_travels(make, every_kind_and_more, exchange)


@pytest.mark.parametrize("container", MORE_CONTAINERS)
def test_every_kind_of_field_is_selected_with_its_row(container: str):
    make, rows = MORE_CONTAINERS[container], [2, 0, 2]
    loaded = make(IDS, every_kind_and_more(IDS))
    if isinstance(loaded, BaseBatch):
        batch = loaded.index_select(rows)
    else:
        view = Rows(loaded)
        batch = view.select([view.packed()], np.array(rows), len(rows))
    check_identical(batch, make(IDS[rows], every_kind_and_more(IDS[rows])))


@pytest.mark.parametrize("kind", MORE_KINDS)
@on_ranks(2)
def test_samples_are_computed_once_and_batches_change_device(kind: str):
    rank = dist.get_rank()
    batch = make_batch(kind, 0, 100 * rank, 3 + 2 * rank)
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, (contents(batch), contents(ContainerShuffler().shuffle(batch))))
    loaded, moved = ([row for of_rank in of_ranks for row in of_rank[at]] for at in range(2))
    assert sorted(map(repr, moved)) == sorted(map(repr, loaded))
    pinned = Rows(batch).to(torch.device("meta")).batch
    assert next(iter(pinned.values())).device.type == "meta"


@on_ranks(2)
def test_a_memory_mapped_tensor_arrives_in_memory():
    moved = HeavyOnRank1().shuffle({"ids": own_ids(), "mapped": MemoryMappedTensor.from_tensor(own_ids())})
    check_identical(moved, {"ids": moved["ids"], "mapped": moved["ids"].clone()})


@on_ranks(2)
def test_tensordicts_keep_names_locks_and_texts_and_change_device():
    inner = TensorDict({"ids": own_ids()}, [ROWS])
    moved = HeavyOnRank1().shuffle(TensorDict({"n": inner}, [ROWS], names=["row"]).lock_())
    check_some_moved(moved["n", "ids"])
    assert moved.names == ["row"] and moved.is_locked
    without_rows = TensorDict({"n": TensorDict({"ids": IDS}, [])}, [])
    assert Rows(without_rows).to(torch.device("meta")).batch["n", "ids"].device.type == "meta"
    make, more = MORE_CONTAINERS["TensorDict"], {"text": f"rank {dist.get_rank()}", "names": ["a", "b"]}
    moved = HeavyOnRank1().shuffle(make(own_ids(), more))
    check_identical(moved, make(ids_of(moved), more))


@tensorclass
class Labeled:
    id: torch.Tensor


@tensorclass
class Tagged:
    id: torch.Tensor


@on_ranks(2)
def test_a_tensorclass_travels_once_its_type_is_registered():
    register_batch_type(
        Labeled,
        parts=lambda labeled: {"id": labeled.id},
        replaced=lambda labeled, parts: Labeled(id=parts["id"], batch_size=[len(parts["id"])]),
    )
    batch = TensorDict({"of": Labeled(id=own_ids(), batch_size=[ROWS])}, batch_size=[ROWS])
    moved = HeavyOnRank1().shuffle(batch)
    check_some_moved(moved["of"].id)
    assert moved.batch_size == (len(moved["of"].id),)


@on_ranks(2)
def test_what_all_samples_share_stays_and_changes_device():
    kinds = {"keyed": KeyedTensor(["a"], [1], torch.rand(2, 1)), "dict": TensorDict({"x": IDS[:1]}, [1])}
    batch = {"ids": own_ids(), **kinds}
    moved = HeavyOnRank1(shared=[*kinds]).shuffle(batch)
    check_some_moved(moved["ids"])
    assert all(moved[kind] is value for kind, value in kinds.items())
    on_meta = Rows(batch, [*kinds]).to(torch.device("meta")).batch
    assert {on_meta["keyed"].values().device.type, on_meta["dict"]["x"].device.type} == {"meta"}


@pytest.mark.parametrize("kind", ["nested", "keyed"])
@on_ranks(2)
def test_each_label_of_a_row_is_a_loss_token(kind: str):
    lengths = [[1, 5, 3], [2, 0, 7]]
    if kind == "nested":
        rows = [torch.ones(count) for count in lengths[dist.get_rank()]]
        labels = torch.nested.nested_tensor(rows, layout=torch.jagged)
    else:
        labels, lengths = KeyedTensor(["click", "like"], [2, 1], torch.ones(3, 3)), [[3] * 3] * 2
    features = KeyedJaggedTensor(["item"], torch.arange(6), lengths=torch.tensor([1, 2, 3]))
    plan = HeavyOnRank1().plan(BaseBatch(features, 3, {"item": 3}, labels=labels))
    assert plan.rows.loss_tokens.tolist() == [*lengths[0], *lengths[1]]


@on_ranks(2)
def test_ranks_agree_on_the_keys_of_keyed_tensors():
    kinds = [KeyedTensor([*key], [1, 1], torch.zeros(ROWS, 2)) for key in ("ab", "ba")]
    error = error_of_all(HeavyOnRank1().plan, held(IDS, kinds[dist.get_rank()]))
    told = r"ValueError: rank 1 has a batch that differs.*field \"more\['a: 1, b: 1'\]\" is missing"
    assert re.match(told, error), error


def _with_holes() -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(IDS, torch.tensor([0, 1, 2, 3, 4]), ONES - 1)


REFUSED: Mapping[str, tuple[Callable[[], Any], str]] = {
    "tensorclass": (lambda: Tagged(IDS, batch_size=[ROWS]), "more is a .*register_batch_type"),
    "non-tensors": (lambda: NonTensorStack(*"abcd"), "more.entries is a .*make it a tensor"),
    "holes": (_with_holes, ".*rows without holes"),
    "key_dim": (lambda: KeyedTensor(["a"], [1], IDS[None], 0), ".*key_dim 0; expected 1"),
}


@on_ranks(2)
def test_what_would_lose_something_is_refused_by_all_ranks():
    for kind, (make, told) in REFUSED.items():
        batch = {"ids": IDS, "more": make()} if dist.get_rank() else {"ids": IDS}
        error = error_of_all(HeavyOnRank1().plan, batch)
        assert re.match(f"TypeError: {told}", error), (kind, error)
