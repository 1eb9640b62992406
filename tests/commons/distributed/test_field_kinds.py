"""Tensors of every dtype and kind of torch and TorchRec travel bit for bit, or all ranks refuse them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import MemoryMappedTensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.sequence_batch.drawn_fields import bytes_of_rows
from tests.on_ranks import on_ranks

ROWS = 4
DTYPES = sorted(
    {str(of).removeprefix("torch.") for of in vars(torch).values() if isinstance(of, torch.dtype)}
)
REFUSED = {"quint8", "qint8", "qint32", "quint4x2", "quint2x4"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)
}
try:
    torch.empty(1, dtype=torch.float4_e2m1fn_x2).to("cpu", copy=True)
except NotImplementedError:  # as in torch 2.9
    REFUSED.add("float4_e2m1fn_x2")


@dataclass
class FieldBatch(BaseBatch):
    dense: torch.Tensor | None = None
    jagged: JaggedTensor | None = None
    shared: torch.Tensor | None = field(default=None, metadata={"per_sample": False})


class HeavyOnRank1(FieldShuffler):
    """Rows of rank 1 cost more, so that some move."""

    shared_fields: tuple[str, ...] = ()

    def get_workloads(self, batch):
        rows = self.view(batch).num_rows
        return torch.full((rows,), 1 + 9 * dist.get_rank())


class Sharing(HeavyOnRank1):
    shared_fields = ("shared",)


def _drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Draws any bits, of which some are NaNs."""
    if dtype in (torch.qint8, torch.quint8, torch.qint32):
        return torch.quantize_per_tensor(torch.zeros(shape), 1.0, 0, dtype)
    bits = np.random.default_rng((dist.get_rank(), *shape)).integers(0, 256, (*shape, dtype.itemsize))
    bits = torch.from_numpy(bits.astype(np.uint8))
    return (bits % 2 if dtype == torch.bool else bits).view(dtype).squeeze(-1)


def _batch_of(dtype: torch.dtype, as_dict: bool) -> Any:
    lengths = torch.tensor([2, 0, 1, 3])
    fields = {
        "dense": _drawn(dtype, ROWS, 3),
        "jagged": JaggedTensor(_drawn(dtype, 6), lengths=lengths, weights=_drawn(dtype, 6, 2)),
        "shared": _drawn(dtype, 2),
    }
    keyed = KeyedJaggedTensor(
        ["a"], torch.arange(6) + 6 * dist.get_rank(), lengths=lengths, weights=_drawn(dtype, 6)
    )
    return {"features": keyed, **fields} if as_dict else FieldBatch(keyed, ROWS, {}, **fields)


def _moved(name: str, as_dict: bool) -> tuple[list[Any], list[Any]] | str:
    """Returns the bytes of this rank's rows before and after; the first step has none on rank 1."""
    shuffler = (Sharing if as_dict else HeavyOnRank1)()

    def step(batch: Any) -> Any:
        plan = shuffler.plan(batch)
        return shuffler.exchange(shuffler.padding_batch() if batch is None else batch, plan)

    try:
        batch = _batch_of(getattr(torch, name), as_dict)
        shared = batch["shared"] if as_dict else batch.shared
        step(batch if dist.get_rank() == 0 else None)
        moved = step(batch)
        assert (moved["shared"] if as_dict else moved.shared) is shared
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    before, after = shuffler.view(batch).fields, shuffler.view(moved).fields
    return bytes_of_rows(before, ROWS), bytes_of_rows(after, ROWS)


def _all_moved(as_dict: bool) -> dict[str, Any]:
    return {name: _moved(name, as_dict) for name in DTYPES}


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_every_dtype_travels_bit_for_bit_or_is_refused_by_all_ranks(pools, as_dict):
    results = pools(2).run(_all_moved, as_dict, timeout=600)
    for name in DTYPES:
        of_ranks = [result[name] for result in results]
        if name in REFUSED:
            for error in of_ranks:
                assert re.match(f"TypeError: .*: a tensor has dtype torch.{name}, whose rows", error), error
            continue
        assert all(isinstance(result, tuple) for result in of_ranks), (name, of_ranks)
        before, after = ([row for rows in side for row in rows] for side in zip(*of_ranks, strict=True))
        assert sorted(before) == sorted(after) and before != after, name


class SubclassedJagged(JaggedTensor):
    pass


class SubclassedKeyed(KeyedJaggedTensor):
    pass


class SubclassedTensor(torch.Tensor):
    pass


class SubclassedDict(dict):
    pass


def _with_attribute() -> SubclassedDict:
    value = SubclassedDict(inner=torch.arange(ROWS))
    value.mask = torch.arange(ROWS)
    return value


def _masked() -> Any:
    return torch.masked.masked_tensor(torch.ones(ROWS), torch.tensor([True, False] * 2))


ONES, IDS = torch.ones(ROWS, dtype=torch.int64), torch.arange(ROWS)
INVERSE = (["a"], torch.zeros(1, ROWS, dtype=torch.int64))
REFUSED_KINDS = {
    "subclassed JaggedTensor": (
        lambda: SubclassedJagged(IDS, lengths=ONES),
        "TypeError: more: a tests.commons.distributed.test_field_kinds.SubclassedJagged would arrive as a "
        "JaggedTensor",
    ),
    "subclassed KeyedJaggedTensor": (
        lambda: SubclassedKeyed(["a"], IDS, lengths=ONES),
        "TypeError: more: a tests.commons.distributed.test_field_kinds.SubclassedKeyed would arrive as a "
        "KeyedJaggedTensor",
    ),
    "subclassed tensor": (
        lambda: IDS.as_subclass(SubclassedTensor),
        "TypeError: more: a tests.commons.distributed.test_field_kinds.SubclassedTensor would arrive as a "
        "Tensor",
    ),
    "masked": (_masked, "TypeError: more: a torch.masked.maskedtensor.core.MaskedTensor would arrive"),
    "masked values": (lambda: JaggedTensor(_masked(), lengths=ONES), "TypeError: more: a torch.masked."),
    "inverse_indices": (
        lambda: KeyedJaggedTensor(["a"], IDS, lengths=ONES, stride=ROWS, inverse_indices=INVERSE),
        "TypeError: more: a KeyedJaggedTensor has inverse_indices",
    ),
    "gradient": (
        lambda: torch.ones(ROWS, requires_grad=True),
        "ValueError: field 'more' requires a gradient",
    ),
    "gradient of weights": (
        lambda: JaggedTensor(IDS, lengths=ONES, weights=torch.ones(ROWS, requires_grad=True)),
        "ValueError: field 'more' requires a gradient",
    ),
    "more weights": (
        lambda: JaggedTensor(IDS, lengths=ONES, weights=torch.ones(ROWS + 2)),
        "ValueError: field 'more' has 4 values and weights of shape (6,)",
    ),
    "fewer weights": (
        lambda: KeyedJaggedTensor(["a"], IDS, lengths=ONES, weights=torch.ones(1)),
        "ValueError: field 'more' has 4 values and weights of shape (1,)",
    ),
    "uint8 lengths": (
        lambda: JaggedTensor(IDS, lengths=ONES.byte()),
        "ValueError: field 'more' has torch.uint8 lengths of shape (4,); expected a flat tensor of int32",
    ),
    "int16 lengths": (
        lambda: KeyedJaggedTensor(["a"], IDS, lengths=ONES.short()),
        "ValueError: field 'more' has torch.int16 lengths",
    ),
    "lengths in two dimensions": (
        lambda: JaggedTensor(IDS, lengths=ONES.view(2, 2)),
        "ValueError: field 'more' has torch.int64 lengths of shape (2, 2)",
    ),
    "sparse values": (
        lambda: JaggedTensor(IDS.to_sparse(), lengths=ONES),
        "TypeError: more: a tensor has layout torch.sparse_coo",
    ),
}


def _errors(kind: str) -> list[str]:
    """Returns errors of two shufflers, to which rank 1 brings a bad batch in the first or second step."""
    make, _ = REFUSED_KINDS[kind]
    more = make()
    good = IDS
    if isinstance(more, JaggedTensor):
        good = JaggedTensor(IDS, lengths=ONES)
    elif isinstance(more, KeyedJaggedTensor):
        good = KeyedJaggedTensor(["a"], IDS, lengths=ONES)
    good, bad = ({"ids": IDS, "more": part} for part in (good, more))
    mine = bad if dist.get_rank() == 1 else good
    at_first, later = HeavyOnRank1(), HeavyOnRank1()
    later.shuffle(good)
    return [error_of(at_first.plan, mine), error_of(later.plan, mine)]


def _all_errors() -> dict[str, list[str]]:
    return {kind: _errors(kind) for kind in REFUSED_KINDS}


@pytest.mark.filterwarnings("ignore")
def test_what_would_lose_something_is_refused_by_all_ranks_at_once(pools):
    for of_rank in pools(2).run(_all_errors, timeout=600):
        for kind, errors in of_rank.items():
            _, expected = REFUSED_KINDS[kind]
            assert all(error.startswith(expected) for error in errors), (kind, errors)


@on_ranks(2)
def test_a_tensor_that_is_an_attribute_of_a_dict_is_refused_by_all_ranks():
    more = _with_attribute() if dist.get_rank() == 1 else SubclassedDict(inner=torch.arange(ROWS))
    error = error_of(HeavyOnRank1().plan, {"ids": IDS, "more": more})
    assert error.startswith("TypeError: more.mask is a tensor that would stay behind when its samples move")


class MergingDict(dict):
    """Its `update` merges dicts within it, as those of configuration libraries do."""

    def update(self, other: Any) -> None:
        for key, value in other.items():
            if isinstance(self.get(key), MergingDict) and isinstance(value, dict):
                self[key].update(value)
            else:
                self[key] = value


@on_ranks(2)
def test_a_dict_that_merges_gives_its_rows_away_and_stays_as_loaded():
    ids = IDS + ROWS * dist.get_rank()
    batch = MergingDict(inner=MergingDict(ids=ids), labels=2 * ids)
    moved = HeavyOnRank1().shuffle(batch)
    assert batch["inner"]["ids"] is ids and torch.equal(2 * moved["inner"]["ids"], moved["labels"])
    assert type(moved["inner"]) is MergingDict and not torch.equal(moved["labels"], batch["labels"])


class AttributeDict(dict):
    """Entries are attributes, too."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


def _taken() -> list[list[int]]:
    rank = dist.get_rank()
    ids = IDS + ROWS * rank
    batch = {
        "ids": ids,
        "attributes": AttributeDict(ids=ids.clone()),
        "mapped": MemoryMappedTensor.from_tensor(ids),
        "no keys": KeyedJaggedTensor([], IDS[:0], lengths=ONES[:0], stride=ROWS),
        "keyed tensor": KeyedTensor(["a"], [1], ids.float().view(-1, 1)),
    }
    moved = HeavyOnRank1().shuffle(batch)
    assert moved["no keys"].keys() == [] and moved["no keys"].stride() == len(moved["ids"])
    assert type(moved["mapped"]) is torch.Tensor and type(moved["attributes"]) is AttributeDict
    others = moved["attributes"].ids, moved["mapped"], moved["keyed tensor"].values().long().flatten()
    return [moved["ids"].tolist(), *(other.tolist() for other in others)]


def test_what_has_nothing_to_lose_is_taken(pools):
    results = pools(2).run(_taken)
    assert sorted(sample for ids, *_ in results for sample in ids) == list(range(2 * ROWS))
    assert all(ids == other for ids, *others in results for other in others)
    assert results[0][0] != list(range(ROWS))
