"""Kinds of fields, made of the numbers of their rows, and containers that hold them."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.distributed import BatchShuffler
from commons.sequence_batch import BaseBatch, register_batch_type
from tests.commons.distributed.loaded_batches import check_identical

ROWS = 4


class HeavyOnRank1(BatchShuffler):
    """Rows of rank 1 cost more, so that some move."""

    def __init__(self, *args: Any, shared: Sequence[str] = (), **settings: Any) -> None:
        self.shared_fields = shared
        super().__init__(*args, **settings)

    def get_workloads(self, batch):
        return torch.full((self.view(batch).num_rows,), 1 + 9 * dist.get_rank())


def own_ids() -> torch.Tensor:
    return torch.arange(ROWS) + ROWS * dist.get_rank()


def check_some_moved(ids: torch.Tensor) -> None:
    """Checks that each row is on one rank, and that rows of this rank have moved."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, ids.tolist())
    assert sorted(row for of_rank in of_ranks for row in of_rank) == list(range(ROWS * len(of_ranks)))
    assert ids.tolist() != own_ids().tolist()


@contextmanager
def naming(*case: Any) -> Iterator[None]:
    """Names a case of a table in its error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case}")
        raise


@contextmanager
def unfilled_memory() -> Iterator[None]:
    """Leaves new memory unfilled, because torch cannot fill that of every dtype."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled


def jagged(ids: torch.Tensor, **parts: Any) -> JaggedTensor:
    """Makes rows of no to two values, which are the number of the row."""
    return JaggedTensor(ids.repeat_interleave(ids % 3), **({"lengths": ids % 3} | parts))


def drawn(dtype: torch.dtype, ids: torch.Tensor, *shape: int) -> torch.Tensor:
    """Draws any bits for each row, of which some are NaNs."""
    drawn = [np.random.default_rng(row).integers(0, 256, (*shape, dtype.itemsize)) for row in ids.tolist()]
    bits = torch.from_numpy(np.array(drawn, dtype=np.uint8).reshape(len(ids), *shape, dtype.itemsize))
    return (bits % 2 if dtype == torch.bool else bits).view(dtype).squeeze(-1)


def of_every_dtype(ids: torch.Tensor) -> dict[str, Any]:
    of_each, lengths = ids.repeat_interleave(ids % 3), ids % 3
    return {
        name: (
            drawn(dtype, ids, 3),
            JaggedTensor(drawn(dtype, of_each), lengths=lengths, weights=drawn(dtype, of_each, 2)),
        )
        for name, dtype in DTYPES.items()
        if name not in REFUSED_DTYPES
    }


def _keyed(ids: torch.Tensor) -> KeyedJaggedTensor:
    values, lengths = torch.cat([ids.repeat_interleave(ids % 3), ids]), torch.cat([ids % 3, ids**0])
    return KeyedJaggedTensor(["a", "b"], values, lengths=lengths.int(), weights=values / 3)


def _no_keys(ids: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([], ids[:0], lengths=ids[:0], stride=len(ids))


def _ragged(dim: int) -> Callable[[torch.Tensor], Any]:
    def make(ids: torch.Tensor) -> Any:
        shapes = [[*[2, 3][: dim - 1], row, *[2, 3][dim - 1 :]] for row in ids.tolist()]
        rows = [torch.full(shape, float(row)) for shape, row in zip(shapes, ids.tolist(), strict=True)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    return make


DTYPES = {str(of).removeprefix("torch."): of for of in vars(torch).values() if isinstance(of, torch.dtype)}
REFUSED_DTYPES = {"quint8", "qint8", "qint32", "quint4x2", "quint2x4"} | {
    f"{sign}int{bits}"
    for sign in ("", "u")
    for bits in range(1, 8)  # their rows lie within bytes
}
with unfilled_memory():
    try:
        torch.empty(1, dtype=torch.float4_e2m1fn_x2).clone()
    except NotImplementedError:  # as in torch 2.9
        REFUSED_DTYPES.add("float4_e2m1fn_x2")

TRAVELS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "numbers": lambda ids: ids,
    "wide numbers": lambda ids: ids.double()[:, None, None].expand(-1, 2, 3),
    "numbers of no width": lambda ids: torch.zeros(len(ids), 0),
    "jagged": jagged,
    "jagged by offsets": lambda ids: JaggedTensor(ids, offsets=torch.arange(len(ids) + 1)),
    "jagged with weights": lambda ids: jagged(ids, weights=jagged(ids).values()[:, None].half() / 7),
    "keyed": _keyed,
    "no keys": _no_keys,
    "deep": lambda ids: {"a": [1, ids, {"b": jagged(ids)}], ("a", "b"): (-ids, "text"), "b/c": ids, 3: ids},
}


# These need the extension `more_kinds`.
MORE_TRAVELS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "keyed tensor": lambda ids: KeyedTensor(["p", "q"], [1, 2], ids[:, None].float() * torch.ones(3)),
    **{f"nested, ragged in dim {dim}": _ragged(dim) for dim in (1, 2, 3)},
}


def every_kind(ids: torch.Tensor) -> dict[str, Any]:
    """Makes a field of each kind."""
    return {kind: make(ids) for kind, make in TRAVELS.items()}


def every_kind_and_more(ids: torch.Tensor) -> dict[str, Any]:
    """Makes a field of each kind, and of each kind of the extension `more_kinds`."""
    return every_kind(ids) | {kind: make(ids) for kind, make in MORE_TRAVELS.items()}


@dataclass
class Plain:
    ids: torch.Tensor
    more: Any


class Pair(NamedTuple):
    ids: torch.Tensor
    more: Any


@dataclass
class Held(BaseBatch):
    """A `BaseBatch` that holds anything, and something that all samples share."""

    ids: torch.Tensor | None = None
    more: Any = None
    shared: Any = field(default=None, metadata={"per_sample": False})


def held(ids: torch.Tensor, more: Any = None, shared: Any = None) -> Held:
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
    return Held(features, len(ids), {"item": 1}, ids=ids, more=more, shared=shared)


class Columns(MutableMapping):
    """A mapping around a dict, as many libraries have."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __setitem__(self, name: str, column: Any) -> None:
        self._columns[name] = column

    def __delitem__(self, name: str) -> None:
        del self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class MergingDict(dict):
    """Its `update` merges dicts within it, as those of configuration libraries do."""

    def update(self, other: Any) -> None:
        for key, value in other.items():
            if isinstance(self.get(key), dict) and isinstance(value, dict):
                self[key].update(value)
            else:
                self[key] = value


class AttributeDict(dict):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


@dataclass(frozen=True)
class Registered:
    """A class that is taken apart by registered functions."""

    held: tuple[torch.Tensor, Any]


register_batch_type(
    Registered,
    parts=lambda of: {"ids": of.held[0], "more": of.held[1]},
    replaced=lambda of, parts: Registered((parts.get("ids", of.held[0]), parts.get("more", of.held[1]))),
)


def _tensordict(ids: torch.Tensor, more: Any) -> TensorDict:
    batch = TensorDict({"ids": ids, "a/b": -ids, "a": {"b": ids}}, batch_size=[len(ids)])
    if isinstance(more, torch.Tensor):
        return batch.set("more", more)
    batch.set_non_tensor("more", more)
    return batch


# Each makes a batch of the numbers of its rows and another field.
CONTAINERS: Mapping[str, Callable[[torch.Tensor, Any], Any]] = {
    "dict": lambda ids, more: {"ids": ids, "more": more},
    "tuple": lambda ids, more: (ids, more),
    "list": lambda ids, more: [ids, "text", more],
    "named tuple": Pair,
    "dataclass": Plain,
    "BaseBatch": held,
    "registered": lambda ids, more: Registered((ids, more)),
    "mapping": lambda ids, more: Columns({"ids": ids, "more": more}),
    "UserDict": lambda ids, more: UserDict(ids=ids, more=more),
    "merging dict": lambda ids, more: MergingDict(ids=ids, more=MergingDict(inner=more)),
    "attributes": lambda ids, more: AttributeDict(ids=ids, more=more),
}


# With one that needs the extension `more_kinds`.
MORE_CONTAINERS: Mapping[str, Callable[[torch.Tensor, Any], Any]] = {**CONTAINERS, "TensorDict": _tensordict}


def ids_of(batch: Any) -> torch.Tensor:
    """Returns the numbers of the rows of a container."""
    if isinstance(batch, Registered):
        return batch.held[0]
    is_named = isinstance(batch, Mapping | TensorDict)
    return batch["ids"] if is_named else batch[0] if isinstance(batch, list | tuple) else batch.ids


def check_travels(make: Callable[..., Any], more: Callable[[torch.Tensor], Any], exchange: str) -> None:
    """Checks that a field moves with its rows, and that the loaded batch keeps it."""
    ids, is_first = own_ids(), dist.get_rank() == 0
    shuffler, loaded = HeavyOnRank1(exchange=exchange), make(ids, more(ids))
    # In the first step, only rank 0 has a batch, from which rank 1 learns of the fields.
    plan = shuffler.plan(loaded if is_first else None)
    first = shuffler.exchange(loaded if is_first else shuffler.padding_batch(), plan)
    check_identical(first, make(ids_of(first), more(ids_of(first))))
    moved = shuffler.shuffle(loaded)
    check_some_moved(ids_of(moved))
    check_identical(moved, make(ids_of(moved), more(ids_of(moved))))
    check_identical(loaded, make(ids, more(ids)))
