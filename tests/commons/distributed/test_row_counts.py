"""Numbers of each row that the plan carries, so that a model has them on the host after the exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.rank_group import RankGroup
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.counted_collectives import wrong_counts_on_host
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.histories import TokenShuffler, draw_histories


def _differences(settings: dict) -> tuple[int, list[str]]:
    """Samples that moved in a few steps, and the counts on the host that are not those of the batch."""
    rng, shuffler, moved, wrong = np.random.default_rng(dist.get_rank()), TokenShuffler(**settings), 0, []
    for _ in range(4):
        loaded = draw_histories(rng, 4)
        plan = shuffler.plan(loaded)
        moved += int((plan.rows.home != plan.destination).sum())
        wrong += wrong_counts_on_host(shuffler.exchange(loaded, plan))
    return moved, wrong


@pytest.mark.parametrize("settings", [{}, {"exchange": "all_gather"}], ids=str)
def test_counts_follow_their_samples(pools, settings):
    for moved, wrong in pools(3).run(_differences, settings):
        assert moved and not wrong


@dataclass(eq=False)
class CountedBatch(BaseBatch):
    """A batch with given counts of its two rows."""

    counts: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), metadata={"per_sample": False})

    def row_counts(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(of_rows) for name, of_rows in self.counts}


def _batch(**counts: tuple[int, ...]) -> CountedBatch:
    features = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([1, 2]))
    return CountedBatch(features, 2, {}, counts=tuple(counts.items()))


def _errors() -> list[str]:
    on_rank = {"a": (1, 2)} if dist.get_rank() else {"b": (1, 2)}
    known = TokenShuffler()
    placed = known.shuffle(_batch(a=(1, 2), b=(3, 2**31 - 1), c=(0, 0)))
    largest = int(max(placed.row_counts_on_host()["b"]))
    return [
        str(largest),
        error_of(TokenShuffler().plan, _batch(**on_rank)),
        error_of(known.plan, _batch(a=(1, 2))),
        error_of(TokenShuffler().plan, _batch(a=(1, 2**31 if dist.get_rank() else 0))),
        error_of(TokenShuffler().plan, _batch(a=(1, -1 if dist.get_rank() else 0))),
        error_of(TokenShuffler().plan, _batch(a=(1, 2, 3))),
    ]


def test_wrong_counts_are_named_on_all_ranks(pools):
    for largest, *errors in pools(2).run(_errors):
        assert largest == str(2**31 - 1) or largest == "3"
        for error, message in zip(
            errors,
            [
                "columns of get_workloads, row_counts of ('a',), but rank 0 has 1 columns",
                "row_counts of ('a',), but the first batch has 1 columns of get_workloads",
                "CountedBatch.row_counts()['a'] has 2147483648 for row 1; expected an integer",
                "CountedBatch.row_counts()['a'] has -1 for row 1",
                "CountedBatch.row_counts()['a'] has shape (3,), expected one number per row: (2,)",
            ],
            strict=True,
        ):
            assert message in error


def _wrong_counts_where_a_set_has_ended(ended: tuple[int, ...]) -> list[str]:
    """Ranks 0 and 2 exchange, rank 1 is alone; these of them have no batch, and run a row of padding."""
    pairs, rank = [dist.new_group(ranks) for ranks in ([0, 2], [1])], dist.get_rank()
    shuffler = TokenShuffler(pairs[rank % 2])
    shuffler.plan_over(RankGroup.of())
    shuffler.plan(draw_histories(np.random.default_rng(rank), 4))
    loaded = None if rank in ended else draw_histories(np.random.default_rng(rank), 4)
    plan = shuffler.plan(loaded)
    assert plan.has_batch != (rank in ended) and plan.whole.has_batch
    brought = shuffler.padding_batch() if loaded is None else loaded
    moved = shuffler.exchange(brought, plan)
    assert rank not in ended or (moved.batch_size, moved.num_samples) == (1, 0)
    return wrong_counts_on_host(moved)


@pytest.mark.parametrize("ended", [(0, 2), (1,)])
def test_counts_are_known_where_all_that_exchange_have_ended(pools, ended):
    assert pools(3).run(_wrong_counts_where_a_set_has_ended, ended) == [[]] * 3


@pytest.mark.parametrize("counts", [(1, 0), (1, 2), (2, 1)])
def test_row_counts_are_the_totals_per_key_only_where_they_add_up(counts):
    features = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([1, 2]))
    loaded = CountedBatch(features, 2, {}, actual_batch_size=1)  # padding has ids
    known = loaded.with_row_counts({"features.item": np.array(counts)})
    assert known.features.length_per_key() == [3]


def test_padding_rows_count_nothing_and_counts_go_with_a_batch_to_a_device():
    features = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([1, 2]))
    loaded = CountedBatch(features, 2, {}, actual_batch_size=1, counts=(("a", (4, 5)),))
    assert loaded.row_counts_on_host()["a"].tolist() == [4, 0]
    known = loaded.with_row_counts({"a": np.array([7, 0])})
    assert known.to(torch.device("cpu")).row_counts_on_host()["a"].tolist() == [7, 0]
