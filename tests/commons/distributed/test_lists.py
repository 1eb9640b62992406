"""Lists beside tensors: with their rows, shared by all ranks, or refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.distributed.rank_group import RankGroup
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.rows import Rows
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.on_ranks import on_ranks

ROWS = 4


class Costs(BatchShuffler):
    def get_workloads(self, batch):
        return batch["cost"]


class OfRank(Costs):
    shared_fields = ("extra", "table")


def batch_of(rank: int, **more) -> dict:
    return {"cost": torch.arange(ROWS) * (1 + 10 * rank), "ids": torch.arange(ROWS) + ROWS * rank, **more}


TEXTS = {
    "strings": lambda rank: [f"user {rank} {row}" for row in range(ROWS)],
    "numbers": lambda rank: [rank * ROWS + row for row in range(ROWS)],
    "tuple": lambda rank: tuple(f"{rank}.{row}" for row in range(ROWS)),
    "nested": lambda rank: [[rank, row] for row in range(ROWS)],
    "records": lambda rank: [{"user": rank, "name": str(row)} for row in range(ROWS)],
    "range": lambda rank: range(rank * ROWS, rank * ROWS + ROWS),
    "by number": lambda rank: {rank * ROWS + row: "text" for row in range(ROWS)},
    "another length": lambda rank: ["text"] * (rank + 1),
    "one rank has none": lambda rank: ["text"] * rank,
}


@pytest.mark.parametrize("kind", TEXTS)
@on_ranks(2)
def test_lists_that_differ_between_ranks_are_refused_on_all_with_remedies_that_work(kind):
    rank = dist.get_rank()
    batch = batch_of(rank, extra=TEXTS[kind](rank))
    error = error_of(Costs().plan, batch)
    assert error.startswith("ValueError: extra is a list that differs on the ranks 0 and 1")
    for remedy in ("integers in a tensor", "a JaggedTensor of their bytes", "shared_fields", "per_sample"):
        assert remedy in error
    moved = OfRank().shuffle(batch_of(rank, extra=TEXTS[kind](rank), table=torch.ones(2)))
    assert moved["extra"] == TEXTS[kind](rank)


@on_ranks(2)
def test_lists_that_are_equal_on_all_ranks_stay_and_may_not_change_later():
    rank, shuffler = dist.get_rank(), Costs()
    names = {"names": ["a", "b", "c", "d"], "deep": {"tuple": ("x", [1, {2, 3}])}}
    for _ in range(2):
        moved = shuffler.shuffle(batch_of(rank, **names))
        assert moved["names"] == names["names"] and moved["deep"] == names["deep"]
    names["names"] = ["a", "b", "c", "e" if rank else "d"]
    error = error_of(shuffler.plan, batch_of(rank, **names))
    assert "names is a list that differs between rank 1 and the first batch" in error


@on_ranks(3)
def test_equal_lists_stay_where_a_rank_is_alone_in_its_group():
    groups, rank = [dist.new_group(ranks) for ranks in ([0], [1, 2])], dist.get_rank()
    shuffler = Costs(groups[min(rank, 1)])
    shuffler.plan_over(RankGroup.of())
    for _ in range(2):
        assert shuffler.shuffle(batch_of(rank, names=["a", "b"]))["names"] == ["a", "b"]
    error = error_of(shuffler.plan, batch_of(rank, names=["a", "c" if rank == 2 else "b"]))
    assert "names is a list that differs between rank 2 and the first batch" in error


@dataclass
class Texts(BaseBatch):
    texts: list[str] | None = None
    names: list[str] = field(default_factory=list, metadata={"per_sample": False})


def texts_of(rank: int, texts: list[str] | None, real: int = ROWS) -> Texts:
    lengths = torch.ones(ROWS, dtype=torch.int64) * (torch.arange(ROWS) < real)
    features = KeyedJaggedTensor(["item"], torch.arange(real) + ROWS * rank, lengths=lengths)
    names = [f"rank {rank}"] * ROWS
    return Texts(features, ROWS, {"item": 1}, ["item"] * ROWS, None, real, texts=texts, names=names)


class ItemShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.features.lengths()


@on_ranks(2)
def test_lists_of_a_base_batch_are_compared_unless_they_are_marked():
    rank = dist.get_rank()
    moved = ItemShuffler().shuffle(texts_of(rank, None))
    assert moved.names == [f"rank {rank}"] * ROWS
    error = error_of(ItemShuffler().plan, texts_of(rank, [str(rank)] * ROWS))
    assert "texts is a list that differs" in error


def test_entries_of_a_list_are_selected_with_their_rows():
    batch = texts_of(0, ["a", "b", "c", "d"])
    selected = batch.index_select([2, 0])
    assert selected.texts == ["c", "a"] and selected.names == batch.names
    assert selected.contextual_feature_names == ["item"] * ROWS
    assert batch.index_select([]).texts == [None]
    assert texts_of(0, ["a", "b", "c"], 3).index_select([1, 3]).texts == ["b"]


@on_ranks(2)
def test_shared_tensors_that_differ_between_ranks_are_named_once():
    rank = dist.get_rank()
    shuffler = OfRank()
    with warnings_of("commons") as records:
        for _ in range(2):
            shuffler.shuffle(batch_of(rank, extra=torch.ones(3), table=torch.full((2,), rank)))
        OfRank().shuffle(batch_of(rank, extra=torch.ones(3), table=torch.ones(2)))
    named = [record for record in records if "declared as shared" in record]
    assert len(named) == (rank == 0)
    assert all("different between ranks: table. They stay with their rank" in record for record in named)


@pytest.mark.parametrize(
    "batch",
    [
        [torch.arange(ROWS) for _ in range(ROWS)],
        [{"ids": torch.arange(ROWS)} for _ in range(ROWS)],
        [(torch.rand(ROWS), torch.arange(ROWS)) for _ in range(ROWS)],
        {number: torch.arange(ROWS) for number in range(ROWS)},
        {"ids": torch.arange(ROWS), "more": [torch.arange(ROWS) for _ in range(ROWS)]},
    ],
    ids=["tensors", "dicts", "pairs", "by number", "within a batch"],
)
def test_tensors_that_may_be_samples_are_no_fields(batch):
    with pytest.raises(TypeError, match=r"4 similar entries.* may be fields or samples.*refined\(costs, n\)"):
        Rows(batch).check()


@pytest.mark.parametrize(
    "batch",
    [
        tuple(torch.arange(ROWS) for _ in range(ROWS)),
        {name: torch.arange(ROWS) for name in "abcd"},
        [torch.arange(ROWS) for _ in range(3)],
        [torch.rand(2), torch.arange(2)],
    ],
    ids=["tuple", "names", "other length", "other kinds"],
)
def test_tensors_that_are_fields_are_taken(batch):
    Rows(batch).check()


def test_samples_of_other_lengths_get_a_recipe():
    with pytest.raises(ValueError, match=r"entries of the list are samples, .*refined\(costs, n\)"):
        Rows([torch.arange(3), torch.arange(5)]).check()


@dataclass
class More(BaseBatch):
    more: torch.Tensor | None = None


FOUR = JaggedTensor(torch.arange(9), lengths=torch.tensor([2, 3, 0, 4]))


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (torch.arange(9.0), "make it a JaggedTensor with the same lengths"),
        (torch.tensor([0, 2, 2, 5, 6]), r"make both one JaggedTensor\(values, offsets=…\)"),
        (torch.rand(7, 4), r"transpose\(0, 1\)"),
        (torch.rand(8), r"view it as \[4, 2\]"),
        (torch.rand(11), "Give it a row per sample"),
    ],
)
def test_remedies_fit_the_shape(value, remedy):
    with pytest.raises(ValueError, match=f"'more' has .*{remedy}.* it then stays with its rank"):
        assert Rows({"items": FOUR, "ids": torch.arange(4), "more": value}).num_rows
    with pytest.raises(ValueError, match=f"{remedy}.*per_sample"):
        features = KeyedJaggedTensor(["item"], FOUR.values(), lengths=FOUR.lengths())
        More(features, 4, {}, more=value)


def test_numbers_of_events_are_told_of_their_key():
    keyed = KeyedJaggedTensor(["item", "user"], torch.arange(9), lengths=torch.tensor([3, 2, 1, 1, 1, 1]))
    with pytest.raises(ValueError, match="for each element of 'item' in 'features', make it a JaggedTensor"):
        assert Rows({"features": keyed, "rating": torch.arange(6)}).num_rows


@pytest.mark.parametrize("dim", [1, 2, 3])
@on_ranks(2)
def test_nested_tensors_move_wherever_they_are_ragged(dim):
    rank = dist.get_rank()
    rng = np.random.default_rng(rank)
    shapes = [[2, 3, 4] for _ in range(ROWS)]
    for shape in shapes:
        shape[dim - 1] = int(rng.integers(0, 6))
    shapes[0][dim - 1] = 7  # not all alike
    rows = [torch.full(shape, float(ROWS * rank + row)) for row, shape in enumerate(shapes)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    moved = Costs().shuffle(batch_of(rank, nested=nested))
    assert moved["nested"]._ragged_idx == nested._ragged_idx == dim
    gathered: list = [None, None]
    dist.all_gather_object(gathered, [tuple(row.shape) for row in rows])
    for sample, row in zip(moved["ids"].tolist(), moved["nested"].unbind(), strict=True):
        assert tuple(row.shape) == gathered[sample // ROWS][sample % ROWS] and row.eq(sample).all()
