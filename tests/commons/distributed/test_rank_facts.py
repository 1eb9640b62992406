"""Plain values that stay with a rank when samples move, and loaded data, compared between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import JaggedTensor

from commons.distributed import BatchShuffler
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.on_ranks import on_ranks

MODULE = "commons.distributed.plan_gather"


class ValueShuffler(BatchShuffler):
    shared_fields = ("of_rank",)

    def get_workloads(self, batch):
        return batch["x"] ** 2


class Attributed(dict):
    """A dict with an attribute."""


def _batch(rank: int, step: int = 0, **more: Any) -> dict[str, Any]:
    return {"x": torch.arange(4) + 10 * rank + step, "names": ["a", "b"], "of_rank": rank} | more


def _warnings(case: str, enabled: bool = True) -> list[str]:
    """Returns what this rank warns of in three steps of a case."""
    with warnings_of(MODULE) as told:
        shuffler = ValueShuffler(enabled=enabled)
        for step in range(3):
            shuffler.shuffle((DIFFERING | LOADED)[case](dist.get_rank(), step))
    return list(told)


def _attributed(rank: int, step: int) -> dict[str, Any]:
    batch = Attributed(_batch(rank, step))
    batch.longest = 20 + rank
    return batch


DIFFERING = {
    "longest (20 on rank 0, 21 on rank 1)": lambda rank, step: _batch(rank, step, longest=20 + rank),
    "is_long (False on rank 0, True on rank 1)": lambda rank, step: _batch(rank, step, is_long=rank > 0),
    "source ('0' on rank 0, '1' on rank 1)": lambda rank, step: _batch(rank, step, source=str(rank)),
    "tasks ({0} on rank 0, {1} on rank 1)": lambda rank, step: _batch(rank, step, tasks={rank}),
    "limits ([1, 0] on rank 0, [1, 1] on rank 1)": lambda rank, step: _batch(rank, step, limits=[1, rank]),
    "of.max (0 on rank 0, 1 on rank 1)": lambda rank, step: _batch(rank, step, of={"max": rank}),
    "late (nothing on rank 0, 3 on rank 1)": lambda rank, step: _batch(
        rank, step, **{"late": 3} if rank else {}
    ),
    "longest (20 on rank 0, 21 on rank 1) ": _attributed,  # as an attribute
}


@pytest.mark.parametrize("text", DIFFERING)
def test_plain_values_that_differ_between_ranks_are_named_once(pools, text):
    (told, *more), others = pools(2).run(_warnings, text)
    assert text.strip() in told and "shared_fields" in told and not (more or others)
    assert pools(2).run(_warnings, text, False) == [[]] * 2  # without moves nothing is compared


def test_values_that_begin_to_differ_later_are_named_then(pools):
    told, _ = pools(2).run(_warnings, "later")
    assert [("seed (" in line, "late (" in line, "number (" in line) for line in told] == [
        (True, False, False),
        (False, True, False),
    ]


@on_ranks(2)
def test_lists_with_an_entry_per_row_are_refused_in_any_step():
    shuffler, rank = ValueShuffler(), dist.get_rank()
    shuffler.plan(_batch(rank, texts=["a"] * 4))
    error = error_of(shuffler.plan, _batch(rank, texts=[f"{rank}"] * 4))
    assert "texts is a list with an entry for each row of rank 0" in error and "shared_fields" in error
    assert shuffler.plan(_batch(rank, texts=["b"] * 4)).has_batch


def _loaded(rank: int, ids: int, weights: Any) -> dict[str, Any]:
    values = torch.arange(6) + ids
    return {
        "x": torch.arange(4) + rank,
        "of_rank": rank,
        "ids": JaggedTensor(values, lengths=torch.tensor([1, 2, 2, 1])),
        "weights": weights,
    }


def _of_new_users(rank: int, _: int) -> dict[str, Any]:
    empty = JaggedTensor(torch.arange(0), lengths=torch.zeros(4, dtype=torch.int64))
    return _loaded(rank, rank, torch.ones(4)) | {"ids": empty}


LOADED = {
    "later": lambda rank, step: _batch(
        rank, step, number=step, seed=max(step, 1) * rank, late=rank * (step == 2)
    ),
    "ranks 0 and 1 loaded the same samples": lambda rank, _: _loaded(rank, 0, torch.rand(4)),
    "equal on all ranks, and as long as the batch: weights.": lambda rank, _: _loaded(
        rank, rank, torch.arange(4.0)
    ),
    "": lambda rank, _: _loaded(rank, rank, torch.ones(4)),
    " ": _of_new_users,
    "equal on all ranks, and as long as the batch: candidates.": lambda rank, _: (
        _loaded(rank, rank, torch.ones(4))
        | {"candidates": JaggedTensor(torch.arange(6), lengths=torch.tensor([1, 2, 2, 1]))}
    ),
}


@pytest.mark.parametrize("text", [name for name in LOADED if name != "later"])
def test_the_same_samples_and_fields_that_samples_may_share_are_named_once(pools, text):
    told, others = pools(2).run(_warnings, text)
    assert [text in line for line in told] == [True] * bool(text.strip()) and others == []
