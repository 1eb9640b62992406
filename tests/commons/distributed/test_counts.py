"""Counts of ranks' rows: costs, tokens, loss tokens, and a batch's own counts."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler, IdentityShuffler
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.counted_collectives import wrong_counts_on_host
from tests.commons.distributed.errors_and_warnings import error_of, error_of_all
from tests.commons.distributed.field_kinds import naming
from tests.commons.distributed.internals import RankGroup
from tests.commons.distributed.loaded_batches import BOTH
from tests.commons.histories import TokenShuffler, draw_histories
from tests.on_ranks import on_ranks


class Counting(BatchShuffler):
    def __init__(self, cost: Any, loss_tokens: Any = None, tokens: Any = None) -> None:
        self._cost, self._loss_tokens, self._tokens = cost, loss_tokens, tokens
        super().__init__()

    def get_workloads(self, batch: Any) -> Any:
        return self._cost(batch)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        return super().get_loss_tokens(batch) if self._loss_tokens is None else self._loss_tokens(batch)

    def get_tokens(self, batch: Any) -> torch.Tensor:
        return super().get_tokens(batch) if self._tokens is None else self._tokens(batch)


LENGTHS = (50_000, 70_000, 3_000, 1)  # the squares of the first two wrap in int32
TILES = [-(-n // 32) for n in LENGTHS]
FLOPS = [10 * 32**2 * n + 4 * 32**3 * m * (m + 1) // 2 for n, m in zip(LENGTHS, TILES, strict=True)]
SQUARES = [n**2 for n in LENGTHS]
COSTS: dict[str, tuple[Callable[[Any], torch.Tensor], list[int]]] = {
    "squares": (lambda batch: batch["ids"].lengths() ** 2, SQUARES),
    "sums of squares": (lambda batch: (batch["ids"].lengths().view(1, -1) ** 2).sum(0), SQUARES),
    "flops": (lambda batch: HSTUFlops(1, 32, 2, 16).per_sample(batch["ids"]["item"].lengths()), FLOPS),
    "a field": (lambda batch: batch["n"] ** 2, SQUARES),
    "columns": (lambda batch: (batch["columns"] ** 2)[:, 0], SQUARES),
    "weights": (lambda batch: (batch["ids"].weights() ** 2)[batch["ids"].offsets()[:-1]], SQUARES),
}


@on_ranks(2)
def test_counts_of_int32_lengths_do_not_wrap():
    lengths = torch.tensor(LENGTHS, dtype=torch.int32).roll(dist.get_rank())
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    keyed = KeyedJaggedTensor(["item"], ids, lengths.repeat_interleave(lengths), lengths=lengths)
    batch = {"ids": keyed, "n": lengths, "columns": lengths[:, None].repeat(1, 2)}
    for name, (cost, of_each) in COSTS.items():
        with naming(name):
            rows = Counting(cost, lambda batch: batch["n"] - 1).plan(batch).rows
            assert rows.workloads.tolist() == [*of_each, *of_each[-1:], *of_each[:-1]]
            assert rows.tokens.tolist() == [*LENGTHS, *LENGTHS[-1:], *LENGTHS[:-1]]
            assert rows.loss_tokens.tolist() == [n - 1 for n in rows.tokens]
    error = error_of_all(Counting(lambda batch: batch["n"].int()).plan, batch)
    assert "returned torch.int32, in which squares and FLOPs overflow silently; compute in int64" in error


BAD_COUNTS: dict[str, tuple[Any, str]] = {
    "too many": (torch.arange(4), r"ValueError: \S+ returned shape \(4,\), .*: \(3,\)"),
    "negative": (torch.tensor([1, -5, 2]), "ValueError: .* returned -5 for row 1"),
    "nan": (torch.tensor([1, 2, float("nan")]), "ValueError: .* returned nan for row 2"),
    "infinite": (torch.tensor([float("inf"), 2, 1]), "ValueError: .* returned inf for row 0"),
    "fraction": (torch.tensor([0.25, 1.0, 2.0]), "ValueError: .* returned 0.25 for row 0.*scaled up"),
    "none": (None, "ValueError: .* returned NoneType, expected integers"),
    "complex": (torch.zeros(3).cfloat(), "ValueError: .* returned torch.complex64"),
    "error": (LookupError("no such table"), "LookupError: no such table"),
    "end of data": (StopIteration("odd"), r"RuntimeError: .*raised StopIteration\('odd'\)"),
}


@on_ranks(2)
def test_bad_counts_of_one_rank_are_the_same_error_on_all():
    def cost(batch):
        returned = BAD_COUNTS[kind][0]
        if not is_bad or dist.get_rank() != 1:
            return batch["cost"]
        if isinstance(returned, Exception):
            raise returned
        return returned

    batch = {"cost": torch.arange(3)}
    for kind, (_, told) in BAD_COUNTS.items():
        at_first, later, is_bad = Counting(cost), Counting(cost), False
        later.plan(batch)
        is_bad = True
        for shuffler in (at_first, later):
            error = error_of_all(shuffler.plan, batch)
            assert re.match(told, error), (kind, error)
    error = error_of(Counting(lambda batch: batch["missing" if dist.get_rank() else "cost"]).plan, batch)
    assert "KeyError: 'missing'" in error and (dist.get_rank() or "raised on rank 1:" in error)


@dataclass(eq=False)
class CountedBatch(BaseBatch):
    counts: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), metadata={"per_sample": False})

    def row_counts(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(of_rows) for name, of_rows in self.counts}


def counted(real: int = 2, **counts: tuple[int, ...]) -> CountedBatch:
    features = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([1, 2]))
    return CountedBatch(features, 2, {}, actual_batch_size=real, counts=tuple(counts.items()))


@on_ranks(2)
def test_each_label_of_a_row_is_a_loss_token():
    lengths = [[1, 5, 3], [2, 0, 7]]
    mine = lengths[dist.get_rank()]
    labels = JaggedTensor(torch.ones(sum(mine)), lengths=torch.tensor(mine))
    features = KeyedJaggedTensor(["item"], torch.arange(6), lengths=torch.tensor([1, 2, 3]))
    plan = TokenShuffler().plan(BaseBatch(features, 3, {"item": 3}, labels=labels))
    assert plan.rows.loss_tokens.tolist() == [*lengths[0], *lengths[1]]
    assert plan.num_loss_tokens == 18


@pytest.mark.parametrize("what", ["tokens", "loss_tokens"])
@on_ranks(2)
def test_counts_are_exact_in_32_bits_and_refused_in_16(what: str):
    def counting(tokens: torch.Tensor) -> Counting:
        return Counting(lambda batch: batch["cost"], **{what: lambda batch: tokens})

    counts, batch = torch.tensor([[301, 4097], [7, 2051]]), {"cost": torch.tensor([3, 1])}
    mask = torch.arange(5000) < counts[dist.get_rank()][:, None]
    rows = counting(mask.float().sum(1)).plan(batch).rows
    # What is not given are the jagged elements of a batch, and one loss token each.
    expected = {"tokens": [0] * 4, "loss_tokens": [1] * 4} | {what: counts.flatten().tolist()}
    assert {name: getattr(rows, name).tolist() for name in expected} == expected
    error = error_of(counting(mask.half().sum(1)).plan, batch)
    assert f"ValueError: Counting.get_{what} returned torch.float16" in error and "in float32" in error


@on_ranks(2)
def test_loss_tokens_are_finite_of_one_type_and_in_int64():
    rank = dist.get_rank()
    shuffler = Counting(lambda batch: batch["cost"], lambda batch: batch["weight"])

    def weighted(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"cost": torch.tensor([1, 2]), "weight": weight}

    for value in (-0.5, torch.nan, torch.inf):
        error = error_of(shuffler.plan, weighted(torch.tensor([0.5, value if rank else 1.0])))
        assert "Counting.get_loss_tokens returned" in error
    assert "dtype" in error_of(shuffler.plan, weighted(torch.ones(2).long() if rank else torch.ones(2)))
    plan = shuffler.plan(weighted(torch.full((2,), 2**62)))
    with pytest.raises(OverflowError, match="more than int64 holds"):
        _ = plan.num_loss_tokens


@pytest.mark.parametrize("exchange", BOTH)
@on_ranks(3)
def test_row_counts_follow_their_samples(exchange: str):
    rng, shuffler, moves = np.random.default_rng(dist.get_rank()), TokenShuffler(exchange=exchange), False
    for _ in range(4):
        loaded = draw_histories(rng, 4)
        plan = shuffler.plan(loaded)
        moves |= plan.moves
        assert wrong_counts_on_host(shuffler.exchange(loaded, plan)) == []
    assert moves


@on_ranks(2)
def test_wrong_row_counts_are_named_on_all_ranks():
    rank, known = dist.get_rank(), TokenShuffler()
    placed = known.shuffle(counted(a=(1, 2), b=(3, 2**40), c=(0, 0)))
    assert int(max(placed.row_counts_on_host()["b"])) in (3, 2**40)
    for shuffler, batch, told in (
        (TokenShuffler(), counted(**{"a" if rank else "b": (1, 2)}), "and a, but rank 0 has 1 columns"),
        (known, counted(a=(1, 2)), "get_workloads, and a, but the first batch has 1 columns"),
        (TokenShuffler(), counted(a=(1, -1 if rank else 0)), "row_counts()['a'] returned -1 for row 1"),
        (
            TokenShuffler(),
            counted(a=(1, 2, 3)),
            "row_counts()['a'] returned shape (3,), expected one number per",
        ),
    ):
        error = error_of_all(shuffler.plan, batch)
        assert error.startswith("ValueError") and told in error, error


@pytest.mark.parametrize("ended", [(0, 2), (1,)])
@on_ranks(3)
def test_row_counts_are_known_where_all_that_exchange_have_ended(ended: tuple[int, ...]):
    """Ranks 0 and 2 exchange, rank 1 is alone; some have no batch, and run a row of padding."""
    pairs, rank = [dist.new_group(ranks) for ranks in ([0, 2], [1])], dist.get_rank()
    shuffler = TokenShuffler(pairs[rank % 2])
    shuffler.plan_over(RankGroup.of())
    shuffler.plan(draw_histories(np.random.default_rng(rank), 4))
    loaded = None if rank in ended else draw_histories(np.random.default_rng(rank), 4)
    plan = shuffler.plan(loaded)
    assert plan.has_batch != (rank in ended) and plan.whole.has_batch
    moved = shuffler.exchange(shuffler.padding_batch() if loaded is None else loaded, plan)
    assert rank not in ended or (moved.batch_size, moved.num_samples) == (1, 0)
    assert wrong_counts_on_host(moved) == []


def test_padding_rows_count_nothing_and_row_counts_go_with_a_batch_to_a_device():
    loaded = counted(real=1, a=(4, 5))
    assert loaded.row_counts_on_host()["a"].tolist() == [4, 0]
    assert loaded.row_counts_on_host()["features.item"].tolist() == [1, 0]
    known = IdentityShuffler().shuffle(loaded)
    assert known.features.length_per_key() == [3]  # with the ids of padding
    assert known.to(torch.device("cpu")).row_counts_on_host() is known.row_counts_on_host()


@pytest.mark.parametrize("of", ["lengths", "offsets"])
@on_ranks(2)
def test_planning_leaves_nothing_in_the_loaded_fields_for_a_copy_to_take_along(of: str):
    lengths = torch.tensor([1, 2, 0, 3])
    given = {"lengths": lengths} if of == "lengths" else {"offsets": torch.tensor([0, 1, 3, 3, 6])}
    values = torch.arange(6, dtype=torch.int32)
    batch = {"keyed": KeyedJaggedTensor(["a"], values, **given), "jagged": JaggedTensor(values, **given)}

    def asked(of_batch):
        return of_batch["keyed"]["a"].offsets()[1:] + of_batch["jagged"].offsets()[1:]

    shuffler = Counting(asked)
    for _ in range(2):
        plan = shuffler.plan(batch)
    assert plan.rows.workloads.tolist() == [2, 6, 6, 12] * 2
    for value in batch.values():
        assert (value.lengths_or_none() is None) == (of == "offsets")
        assert (value.offsets_or_none() is None) == (of == "lengths")


@on_ranks(2)
def test_a_key_that_counting_adds_is_there_for_the_next_count_and_stays_out_of_the_batch():
    def cost(batch):
        batch["n"] = batch["inner"]["mask"].sum(1)
        batch["inner"]["n"] = batch["n"]
        return batch["n"]

    batch = {"inner": {"mask": torch.ones(4, 3 + dist.get_rank(), dtype=torch.int64)[:, :3]}}
    shuffler = Counting(cost, lambda batch: batch["n"])
    assert shuffler.plan(batch).rows.loss_tokens.tolist() == [3] * 8
    moved = shuffler.shuffle(batch)
    assert [*batch, *batch["inner"]] == [*moved, *moved["inner"]] == ["inner", "mask"]


@on_ranks(2)
def test_counting_may_not_write_into_the_batch():
    def writes(batch):
        if dist.get_rank():
            batch["mask"].fill_(0)
        return torch.ones(2, dtype=torch.int64)

    error = error_of_all(Counting(writes).plan, {"mask": torch.ones(2, 3)})
    assert error.startswith("ValueError: mask of a batch changed") and "work on a clone" in error
    items = JaggedTensor(torch.arange(7), lengths=torch.tensor([3, 4]))
    caps = Counting(lambda batch: batch["items"].lengths().clamp_(max=2 + dist.get_rank()))
    assert "ValueError: items.lengths() of a batch changed" in error_of_all(caps.plan, {"items": items})
