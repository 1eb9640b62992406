"""A field travels with its samples, bit for bit; or it stays with its rank; or all ranks refuse it."""

import re
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import IdentityShuffler
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of, error_of_all, warnings_of
from tests.commons.distributed.field_kinds import (
    CONTAINERS,
    DTYPES,
    REFUSED_DTYPES,
    ROWS,
    HeavyOnRank1,
    check_some_moved,
    check_travels,
    drawn,
    every_kind,
    held,
    ids_of,
    naming,
    of_every_dtype,
    own_ids,
    unfilled_memory,
)
from tests.commons.distributed.internals import RankGroup
from tests.commons.distributed.loaded_batches import BOTH, check_identical
from tests.commons.sequence_batch.internals import Rows
from tests.on_ranks import on_ranks

IDS, ONES = torch.arange(ROWS), torch.ones(ROWS, dtype=torch.int64)


@pytest.mark.parametrize("exchange", BOTH)
@on_ranks(2)
def test_every_kind_of_field_travels_with_its_row_in_any_container(exchange: str):
    for container, make in CONTAINERS.items():
        with naming(container):
            check_travels(make, every_kind, exchange)


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_kind_of_field_is_selected_with_its_row(container: str):
    make, rows = CONTAINERS[container], [2, 0, 2]
    loaded = make(IDS, every_kind(IDS))
    if isinstance(loaded, BaseBatch):
        batch = loaded.index_select(rows)
    else:
        view = Rows(loaded)
        batch = view.select([view.packed()], np.array(rows), len(rows))
    check_identical(batch, make(IDS[rows], every_kind(IDS[rows])))


def test_rows_of_a_list_are_not_selected():
    assert held(IDS, more=["a", "b"], shared=["a"] * ROWS).index_select([1]).more == ["a", "b"]
    for more in (["a"] * ROWS, {row: "a" for row in range(ROWS)}):
        with pytest.raises(TypeError, match=r"index_select got more, a list with .*per_sample"):
            held(IDS, more=more).index_select([1])


@pytest.mark.parametrize("exchange", BOTH)
@on_ranks(2)
def test_every_dtype_travels_bit_for_bit(exchange: str):
    with unfilled_memory():
        check_travels(CONTAINERS["dict"], of_every_dtype, exchange)


@on_ranks(2)
def test_plain_values_and_lists_that_are_equal_on_all_ranks_stay():
    rank = dist.get_rank()
    more = {
        "text": f"rank {rank}",
        "number": rank / 2,
        "none": None,
        "function": len,
        "dtype": torch.float16,
        "names": ["a", "b", "c", "d"],
        "deep": {"texts": ("x", [1, {2, 3}]), "rank": rank},
    }
    for container in ("dict", "dataclass", "BaseBatch"):
        with naming(container):
            make, shuffler = CONTAINERS[container], HeavyOnRank1()
            for _ in range(2):
                moved = shuffler.shuffle(make(own_ids(), more))
                check_some_moved(ids_of(moved))
                check_identical(moved, make(ids_of(moved), more))


LISTS: Mapping[str, Callable[[int], Any]] = {
    "strings": lambda rank: [f"user {rank} {row}" for row in range(ROWS)],
    "tuple": lambda rank: tuple(f"{rank}.{row}" for row in range(ROWS)),
    "records": lambda rank: [{"user": rank, "name": str(row)} for row in range(ROWS)],
    "range": lambda rank: range(rank * ROWS, rank * ROWS + ROWS),
    "by number": lambda rank: {rank * ROWS + row: "text" for row in range(ROWS)},
}
OTHERS: Mapping[str, Callable[[int], Any]] = {
    "list of another length": lambda rank: ["text"] * (rank + 1),
    "tensor": lambda rank: torch.full((2,), rank),
    "number": lambda rank: torch.tensor(0.5),
    "array": lambda rank: np.zeros(2),
    "object": lambda rank: [object()],
    "tensors": lambda rank: [torch.arange(ROWS)] * ROWS,
    "batch": lambda rank: held(torch.arange(3)),
}


@on_ranks(2)
def test_what_is_declared_as_shared_stays_and_lists_that_differ_have_to_be():
    rank = dist.get_rank()
    for kind, make in {**LISTS, **OTHERS}.items():
        with naming(kind):
            more = make(rank)
            moved = HeavyOnRank1(shared=["of.more"]).shuffle({"ids": own_ids(), "of": {"more": more}})
            check_some_moved(moved["ids"])
            assert moved["of"]["more"] is more
            assert HeavyOnRank1().shuffle(held(own_ids(), shared=more)).shared is more
            for container in ("dict", "BaseBatch") if kind in LISTS else ():
                error = error_of_all(HeavyOnRank1().plan, CONTAINERS[container](own_ids(), more))
                assert error.startswith("ValueError: more is a list with an entry for each row"), error
                for remedy in ("integers in a tensor", "JaggedTensor", "shared_fields", "per_sample"):
                    assert remedy in error


NAMES = "abcdefgh"[:ROWS]


@on_ranks(3)
def test_a_list_may_not_change_later_even_where_a_rank_is_alone_in_its_group():
    groups, rank = [dist.new_group(ranks) for ranks in ([0], [1, 2])], dist.get_rank()
    for group in (None, groups[min(rank, 1)]):
        shuffler = HeavyOnRank1(group)
        shuffler.plan_over(RankGroup.of())
        for _ in range(2):
            assert shuffler.shuffle({"ids": own_ids(), "names": [*NAMES]})["names"] == [*NAMES]
        batch = {"ids": own_ids(), "names": [*NAMES[:-1], "other" if rank == 2 else NAMES[-1]]}
        assert "names is a list with an entry for each row of" in error_of_all(shuffler.plan, batch)


@on_ranks(2)
def test_shared_tensors_that_differ_between_ranks_are_named_once():
    rank = dist.get_rank()
    shuffler = HeavyOnRank1(shared=["equal", "table"])
    with warnings_of("commons") as records:
        for table in (rank, rank, 0):
            shuffler.shuffle({"ids": own_ids(), "equal": torch.ones(3), "table": torch.full((2,), table)})
    named = [record for record in records if "different between ranks: table" in record]
    assert len(named) == (rank == 0)


@on_ranks(2)
def test_a_shuffler_names_the_paths_of_what_is_shared():
    for batch, shared, keyword in (
        ({"ids": own_ids()}, "rates", "not in the batch"),
        (held(own_ids()), "more", "per_sample"),
    ):
        error = error_of_all(HeavyOnRank1(shared=[shared]).shuffle, batch)
        assert error.startswith("ValueError") and f"'{shared}'" in error and keyword in error


def test_a_subclass_of_the_identity_names_shared_fields_too():
    class NotBalancing(IdentityShuffler):
        shared_fields = ("rate",)

    batch = {"ids": torch.arange(3), "rate": torch.tensor(0.5)}
    assert NotBalancing().plan(batch).num_placed.tolist() == [3]


def _step(shuffler: HeavyOnRank1, batch: Any) -> Any:
    plan = shuffler.plan(batch)
    return shuffler.exchange(shuffler.padding_batch() if batch is None else batch, plan)


@on_ranks(3)
def test_a_rank_without_a_batch_has_what_the_others_samples_share():
    shuffler = HeavyOnRank1(shared=["scale"])
    for step in range(3):
        batch = {"ids": own_ids(), "scale": torch.tensor(0.5 + step), "step": step, "name": str(step)}
        moved = _step(shuffler, batch if step == 0 or dist.get_rank() == 1 else None)
        assert (float(moved["scale"]), moved["step"], moved["name"]) == (0.5 + step, step, str(step))


@on_ranks(2)
def test_what_does_not_pickle_may_not_change_while_a_rank_has_no_batch():
    rank, shuffler = dist.get_rank(), HeavyOnRank1()
    for step in range(3):
        batch = {"ids": own_ids(), "step": step // 2, "decode": lambda text: text}
        given = batch if step == 0 or rank == 0 else None
        if step == 2:
            assert "a batch of rank 0 does not pickle" in error_of(shuffler.plan, given)
        else:
            assert len(_step(shuffler, given)["ids"]) == ROWS // (step + 1)
    batch = {"ids": own_ids(), "call": lambda: 0} if rank else None
    assert "a batch of rank 1 does not pickle" in error_of(HeavyOnRank1().plan, batch)


class SubclassedKeyed(KeyedJaggedTensor):
    pass


class SubclassedTensor(torch.Tensor):
    pass


class SubclassedDict(dict):
    pass


class SlottedDict(dict):
    __slots__ = ("mask",)


def _with_attribute(of: type, mask: Any, **fields: Any) -> Any:
    batch = of(**fields)
    batch.mask = mask
    return batch


def _with_private(batch: Any) -> Any:
    batch._scale = 2.0
    return batch


@dataclass
class WithDefault:
    ids: torch.Tensor
    mask = None  # no field
    _scale = 1.0


@dataclass
class Doubling:
    ids: torch.Tensor

    def __post_init__(self) -> None:
        self.ids = self.ids * 2


@dataclass
class WithMask:
    ids: torch.Tensor

    def __post_init__(self) -> None:
        self.mask = {"odd": self.ids % 2 == 1}


@dataclass
class WithWeights:
    ids: torch.Tensor
    weights: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weights = self.ids.float()


class PairOf(NamedTuple):
    ids: torch.Tensor


class NamedPair(PairOf):
    """A named tuple that takes attributes."""


@dataclass
class OfSomethingElse:
    ids: torch.Tensor
    factor: InitVar[int] = 1

    def __post_init__(self, factor: int) -> None:
        self.ids = self.ids * factor


@dataclass
class Pieced(BaseBatch):
    pieces: torch.Tensor | None = None


def _keyed(lengths: torch.Tensor, **parts: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], IDS, lengths=lengths, **parts)


def _masked() -> Any:
    return torch.masked.masked_tensor(torch.ones(ROWS), torch.tensor([True, False] * 2))


def _base(batch_type: type, **parts: Any) -> Any:
    return batch_type(_keyed(ONES), ROWS, {}, **parts)


def _shrunk() -> Any:
    batch = held(IDS, more={"x": torch.ones(ROWS)})
    batch.more["x"] = torch.ones(2)  # after the batch has checked it
    return batch


SIMILAR = "TypeError: .*4 similar entries.*fields or samples.*refined"
# What a batch holds beside `ids`, and what the error says.
REFUSED_FIELDS: Mapping[str, tuple[Callable[[], Any], str]] = {
    "array": (lambda: np.arange(ROWS), r"TypeError: more is a numpy\.ndarray, .*make it a tensor"),
    "object": (lambda: {"a b": object()}, r"TypeError: more\['a b'\] is a object, .*register_batch_type"),
    "strided": (lambda: torch.nested.nested_tensor([IDS, IDS]), r"TypeError: more: .*layout torch\.jagged"),
    "sparse values": (
        lambda: JaggedTensor(IDS.to_sparse(), None, ONES),
        "TypeError: more: .*torch.sparse_coo",
    ),
    "keyed subclass": (
        lambda: SubclassedKeyed(["a"], IDS, lengths=ONES),
        "TypeError: more: .* would arrive as a KeyedJaggedTensor",
    ),
    "subclass": (lambda: IDS.as_subclass(SubclassedTensor), "TypeError: more: .* would arrive as a Tensor"),
    "masked": (_masked, "TypeError: more: a .*MaskedTensor would arrive"),
    "inverse": (
        lambda: _keyed(ONES, stride=ROWS, inverse_indices=(["a"], IDS[None])),
        "TypeError: more: .*inverse_indices",
    ),
    "varying stride": (
        lambda: KeyedJaggedTensor(["a", "b"], IDS, lengths=ONES, stride_per_key_per_rank=[[3], [1]]),
        r"ValueError: more is a .*variable batch size per key \(VBE\)",
    ),
    "gradient": (lambda: torch.ones(ROWS).requires_grad_(), "ValueError: .*'more' requires a grad.*detach"),
    "gradient of weights": (
        lambda: JaggedTensor(IDS, lengths=ONES, weights=torch.ones(ROWS, requires_grad=True)),
        "ValueError: .*'more' requires a gradient",
    ),
    "more weights": (
        lambda: JaggedTensor(IDS, lengths=ONES, weights=torch.ones(6)),
        r"ValueError: .*'more' has 4 values and weights of shape \(6,\)",
    ),
    "more values": (lambda: _keyed(ONES // 2), "ValueError: .*'more' has 4 values, its lengths add up to 0"),
    "values before": (
        lambda: JaggedTensor(torch.arange(6), offsets=torch.arange(5) + 2),
        "ValueError: .*'more' has 6 values, .*first row starts at 2",
    ),
    "uint8 lengths": (
        lambda: JaggedTensor(IDS, None, ONES.byte()),
        "ValueError: .*'more' has .*expected .*int32",
    ),
    "wide lengths": (
        lambda: JaggedTensor(IDS, lengths=ONES.view(2, 2)),
        r"ValueError: .*'more' has torch.int64 lengths of shape \(2, 2\)",
    ),
    "negative length": (
        lambda: _keyed(torch.tensor([1, -1, 2, 2])),
        "ValueError: .*'more' has a length of -1 for row 1 of key 'a'; expected 0",
    ),
    "no rows": (lambda: torch.tensor(1.0), "ValueError: more .*without rows.*shared_fields"),
    "fewer rows": (lambda: IDS[:2], "ValueError: fields .*{'ids': 4, 'more': 2}"),
    "tensors": (lambda: [IDS] * ROWS, SIMILAR),
    "a batch": (lambda: held(IDS), "TypeError: more is a .*Held within a dict, .*the whole a BaseBatch"),
}
REFUSED_BATCHES: Mapping[str, tuple[Callable[[], Any], str]] = {
    "no field": (dict, "TypeError: dict has no rows to place; expected a BaseBatch"),
    "a text": (lambda: {"name": "train"}, "TypeError: dict has no rows"),
    "unknown": (object, "TypeError: object has no rows.*register_batch_type"),
    "an attribute": (
        lambda: _with_attribute(UserDict, IDS + 1, ids=IDS),
        "TypeError: mask .*only an attribute",
    ),
    "a slot": (lambda: _with_attribute(SlottedDict, IDS + 1, ids=IDS), "TypeError: mask .*only an attribute"),
    "in an attribute": (
        lambda: _with_attribute(SubclassedDict, {"of items": np.arange(ROWS)}, ids=IDS),
        r"TypeError: mask\['of items'\] is an array .*only an attribute",
    ),
    "texts in an attribute": (
        lambda: _with_attribute(SubclassedDict, [*"texts"[:ROWS]], ids=IDS),
        "ValueError: mask is a list with an entry for each row of rank 1",
    ),
    "over a default": (
        lambda: _with_attribute(WithDefault, IDS + 1, ids=IDS),
        "TypeError: mask .*make it a field",
    ),
    "in __post_init__": (lambda: WithMask(IDS), "TypeError: mask.odd is a tensor .*make it a field"),
    "private, over a default": (
        lambda: _with_private(WithDefault(IDS)),
        "TypeError: _scale changes .*register_batch_type",
    ),
    "from a loader": (
        lambda: _with_attribute(WithSum, "a mask", ids=IDS),
        "TypeError: mask changes .*make it a field",
    ),
    "of a named tuple": (lambda: _with_attribute(NamedPair, 2, ids=IDS), "TypeError: mask changes"),
    "not in __init__": (lambda: WithWeights(IDS), "TypeError: weights changes .*field that __init__ takes"),
    "doubled": (lambda: Doubling(IDS), "TypeError: ids changes .*register_batch_type"),
    "an InitVar": (lambda: OfSomethingElse(IDS), "TypeError: .*other than its fields; .*register_batch_type"),
    "a reserved name": (lambda: _base(Pieced, pieces=IDS), "TypeError: .*Pieced .*'pieces'.*rename it"),
    "lost rows": (_shrunk, "ValueError: Held.more.x has 2 rows, expected batch_size = 4"),
    "dicts": (lambda: [{"ids": IDS}] * ROWS, SIMILAR),
    "by number": (lambda: dict.fromkeys(range(ROWS), IDS), SIMILAR),
    "lengths of samples": (
        lambda: [IDS, IDS[:2]],
        r"ValueError: fields have different numbers of rows: {'\[0\]': 4, '\[1\]': 2}",
    ),
}


def _on_rank_1(batch: Any, other: Any) -> Any:
    return other if dist.get_rank() else batch


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_what_would_lose_something_is_refused_by_all_ranks_at_once():
    later, good = HeavyOnRank1(), {"ids": IDS}
    later.shuffle(good)
    refused = [(kind, {"ids": IDS, "more": make()}, told) for kind, (make, told) in REFUSED_FIELDS.items()]
    refused += [(kind, make(), told) for kind, (make, told) in REFUSED_BATCHES.items()]
    for kind, batch, told in refused:
        first, second = (error_of_all(of.plan, _on_rank_1(good, batch)) for of in (HeavyOnRank1(), later))
        assert re.match(told, first), (kind, first)
        # A later batch may just have other fields than the first.
        assert re.match(f"{told}|(Type|Value)Error: .*the first", second), (kind, second)


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_dtypes_whose_rows_cannot_be_sent_are_refused_by_all_ranks():
    shuffler = HeavyOnRank1()
    for name in sorted(REFUSED_DTYPES & DTYPES.keys()):
        if name in ("qint8", "quint8", "qint32"):
            values = torch.quantize_per_tensor(torch.zeros(ROWS), 1.0, 0, DTYPES[name])
        else:
            values = drawn(DTYPES[name], IDS)
        for more in (values, JaggedTensor(IDS, lengths=ONES, weights=values)):
            error = error_of_all(shuffler.plan, {"ids": IDS, "more": more})
            assert re.match(f"TypeError: more: .*dtype torch.{name}, whose rows", error), error


def test_a_base_batch_refuses_what_would_stay_behind_when_it_is_made():
    with pytest.raises(TypeError, match=r"Held.more\[0\] is a .*, which would stay behind.*per_sample"):
        held(IDS, more=[np.zeros(ROWS)])


FOUR = JaggedTensor(torch.arange(9), lengths=torch.tensor([2, 3, 0, 4]))
KEYED = KeyedJaggedTensor(["item", "user"], torch.arange(10), lengths=torch.tensor([3, 2, 1, 0, 1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (torch.arange(9.0), "for each of '.*', make it a JaggedTensor with the same lengths"),
        (torch.tensor([0, 2, 2, 5, 9]), r"make both one JaggedTensor\(values, offsets=\.\.\.\)"),
        (torch.rand(7, 4), r"transpose\(0, 1\)"),
        (torch.rand(8), r"view it as \[4, 2\]"),
        (torch.rand(11), "Give it a row per sample"),
        (torch.rand(6), "for each element of 'item' in '.*', make it a JaggedTensor"),
    ],
)
def test_the_remedy_fits_the_shape_of_a_field_of_other_rows(value: torch.Tensor, remedy: str):
    fields = {"items": FOUR, "keyed": KEYED, "more": value}
    with pytest.raises(ValueError, match=f"'more' has .*{remedy}.* stays with its rank"):
        assert Rows(fields).num_rows
    with pytest.raises(ValueError, match=f"Held.more.* has .*{remedy}.*per_sample"):
        held(torch.arange(4), more=fields)


def test_tensors_that_are_fields_are_taken():
    for batch in ((IDS,) * ROWS, dict.fromkeys("abcd", IDS), [IDS] * 3, [torch.rand(2), torch.arange(2)]):
        Rows(batch).check()


@dataclass
class WithSum:
    """Works numbers out of its ids, and tells when it was made."""

    ids: torch.Tensor
    names: list[str] = field(default_factory=list)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.ids, self.names = self.ids.long(), [*self.names]  # changes nothing the second time
        self.count, self.total = len(self.ids), int(self.ids.sum())
        self.made = np.random.default_rng().random()


@on_ranks(2)
def test_what_a_batch_works_out_of_its_fields_is_worked_out_again_and_equal_texts_stay():
    moved = HeavyOnRank1().shuffle(WithSum(own_ids().int()))
    check_some_moved(moved.ids)
    assert (moved.count, moved.total) == (len(moved.ids), int(moved.ids.sum()))
    moved = HeavyOnRank1().shuffle(_with_attribute(SubclassedDict, ["a", "b"], ids=IDS))
    assert moved.mask == ["a", "b"]


class Remembering(UserDict):
    """A mapping that computes a sum of each row once, as tokenizers' batches may."""

    @cached_property
    def totals(self) -> torch.Tensor:
        return self["x"].sum(1)


@on_ranks(2)
def test_cached_properties_of_an_exchanged_batch_are_those_of_its_own_rows():
    batch = Remembering(x=own_ids().view(ROWS, 1).repeat(1, 2))
    batch.totals.sum()
    moved = HeavyOnRank1().shuffle(batch)
    check_some_moved(moved["x"][:, 0])
    assert moved.totals.equal(moved["x"].sum(1))


@on_ranks(2)
def test_ranks_and_steps_agree_on_the_types_and_formats_of_batches():
    twice = torch.arange(2 * ROWS), None, ONES.repeat(2)
    keyed = {keys: KeyedJaggedTensor([*keys], *twice) for keys in ("xy", "yx")}
    # Rank 1's batch knows its padding rows, that of rank 0 does not.
    batches = {"features": held(IDS).features}, BaseBatch(held(IDS).features, ROWS, {})
    assert "of different types" in error_of_all(HeavyOnRank1().plan, _on_rank_1(*batches))
    for batch, other, told in (
        (held(IDS), held(IDS.int()), "field 'features' has dtype torch.int32, expected torch.int64"),
        (held(IDS, IDS), held(IDS), "field 'more' is missing"),
        ({"x": IDS, "y": IDS}, {"y": IDS, "x": IDS}, r"\['y', 'x'\]"),
        (
            held(IDS, keyed["xy"]),
            held(IDS, keyed["yx"]),
            r"'more' has keys \('y', 'x'\), expected \('x', 'y'\)",
        ),
    ):
        later = HeavyOnRank1()
        later.shuffle(batch)
        for shuffler in (HeavyOnRank1(), later):
            error = error_of_all(shuffler.plan, _on_rank_1(batch, other))
            assert re.match(f"ValueError: rank 1 has a batch that differs.*{told}", error), error


@on_ranks(2)
def test_the_type_of_batches_is_that_of_the_first_that_was_planned():
    shuffler = HeavyOnRank1()
    assert "no rows" in error_of_all(shuffler.plan, ["a"])
    assert not shuffler.plan(None).has_batch
    assert shuffler.plan(_on_rank_1({"x": IDS}, None)).rows.num_loaded.tolist() == [ROWS, 0]
    assert "no rows" in error_of_all(shuffler.plan, _on_rank_1({"x": IDS}, ["a"]))
    assert shuffler.plan({"x": IDS}).rows.num_loaded.tolist() == [ROWS, ROWS]
    assert "a batch is a list, and the first was a dict" in error_of_all(shuffler.plan, [IDS])
