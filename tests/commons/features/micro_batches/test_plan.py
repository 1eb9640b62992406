"""Micro-batches of any container, and samples above the cap."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShufflerFactory
from tests.commons.distributed.container_batches import KINDS, ContainerShuffler, contents, make_batch
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.commons.distributed.loaded_batches import check_identical, lopsided_batch
from tests.commons.distributed.shufflers import DictShuffler, FieldShuffler, check_divided


def _error_of_another_cap() -> str:
    cap = 8 if dist.get_rank() == 1 else 16
    return error_of(FieldShuffler(max_tokens_per_micro_batch=cap).plan, lopsided_batch())


def test_ranks_that_would_divide_differently_are_refused(pools):
    first, second = pools(2).run(_error_of_another_cap)
    assert first == second
    assert first.startswith("ValueError: rank 1's shuffler has") and "all ranks need the same" in first


def _divide_container(kind: str, seed: int, rows: tuple[int, ...], cap: int) -> int:
    shuffler = ContainerShuffler(verify=True, max_tokens_per_micro_batch=cap)
    rank = dist.get_rank()
    batch = make_batch(kind, seed, 1000 * (rank + 1), rows[rank])
    plan = shuffler.plan(batch)
    check_divided(plan, cap)
    moved = shuffler.exchange(batch, plan)
    micro_batches = shuffler.micro_batches(moved, plan)
    every = contents(moved)
    for micro_batch, of_one in zip(micro_batches, plan.micro_batches_on(rank), strict=True):
        assert type(micro_batch) is type(batch)
        got = contents(micro_batch)
        assert got[: len(of_one)] == [every[row] for row in of_one]
        assert len(got) == max(len(of_one), 1)
        if kind == "dict":
            assert list(micro_batch) == list(batch)
            for shared in ("name", "rate", "limits", "nothing"):
                assert micro_batch[shared] is batch[shared]
        elif kind == "tensordict":
            assert micro_batch.batch_size == (len(got),)
    back = shuffler.unshuffle(micro_batches, plan)
    check_identical(*((vars(back), vars(batch)) if kind == "torchrec" else (back, batch)))
    return plan.num_micro_batches


@settings(max_examples=15)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    rows=st.tuples(*[st.integers(1, 6)] * 3),
    cap=st.sampled_from([4, 9, 10**6]),
)
def test_any_container_is_divided_and_comes_back(pools, kind, seed, rows, cap):
    (count,) = set(pools(3).run(_divide_container, kind, seed, rows, cap))
    assert count == 1 or cap < 10**6


def _histories(lengths: list[int]) -> dict:
    """Makes a batch of samples of so many tokens and equal cost."""
    ids = KeyedJaggedTensor(["items"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))
    return {"ids": ids, "workload": torch.ones(len(lengths), dtype=torch.int64)}


NAMED = "row {} of a batch of {} has {} tokens, above max_tokens_per_micro_batch=20: it gets a micro"


def test_a_sample_above_the_cap_is_named_once_until_a_longer_one_comes(caplog):
    shuffler = BatchShufflerFactory.create("identity", max_tokens_per_micro_batch=20)
    named = []
    for lengths in ([3, 20], [3, 50, 21], [50, 49, 30], [20, 9, 51], [51]):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            plan = shuffler.plan(_histories(lengths))
        check_divided(plan, 20)
        named.append([record.getMessage() for record in caplog.records])
    assert [len(messages) for messages in named] == [0, 1, 0, 1, 0]
    assert named[1][0].startswith(NAMED.format(1, "rank 0", 50))
    assert named[3][0].startswith(NAMED.format(2, "rank 0", 51))


def _named_samples(lengths: tuple[list[int], ...]) -> list[str]:
    with warnings_of("commons.distributed.planner") as messages:
        DictShuffler(max_tokens_per_micro_batch=20).plan(_histories(lengths[dist.get_rank()]))
    return messages


def test_rank_0_names_a_sample_above_the_cap_and_the_rank_that_loaded_it(pools):
    named, *nothing = pools(3).run(_named_samples, ([2, 30], [4, 5, 99, 7], [98]))
    assert [len(messages) for messages in (named, *nothing)] == [1, 0, 0]
    assert named[0].startswith(NAMED.format(2, "rank 1", 99))
