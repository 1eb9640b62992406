"""Micro-batches of any container, and samples above the cap."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler, IdentityShuffler, ShufflePlan
from commons.extensions.micro_batches import MicroBatches
from tests.commons.distributed.compiled_kernels import before_and_after_placing
from tests.commons.distributed.container_batches import (
    KINDS,
    ContainerShuffler,
    check_shared,
    contents,
    make_batch,
)
from tests.commons.distributed.counted_collectives import (
    no_synchronization,
    recorded_collectives,
    wrong_counts_on_host,
)
from tests.commons.distributed.errors_and_warnings import error_of, error_of_all, warnings_of
from tests.commons.distributed.field_kinds import CONTAINERS, ids_of
from tests.commons.distributed.internals import RankGroup
from tests.commons.distributed.loaded_batches import (
    BOTH,
    check_identical,
    lopsided_batch,
    many_fields,
    model_outputs,
)
from tests.commons.distributed.shufflers import Case, DictShuffler, FieldShuffler, cases, exchanged
from tests.commons.extensions.micro_batches.divided import check_divided, in_micro_batches
from tests.commons.extensions.micro_batches.internals import micro_batch_imbalance, rows_of_micro_batches
from tests.commons.histories import TokenShuffler, draw_histories, histories
from tests.commons.histories import contents as contents_of_histories
from tests.drawn_batches import MixedBatch
from tests.on_ranks import on_ranks
from tests.own_memory import check_own_memory


def test_partitioners_do_not_even_out_tokens_with_micro_batches():
    assert MicroBatches(9).partitioner_arguments["token_tolerance"] is None


@on_ranks(2)
def test_a_cap_below_one_token_and_one_that_differs_between_ranks_are_refused():
    assert "max_tokens=0: expected an integer" in error_of(MicroBatches, 0)
    error = error_of_all(FieldShuffler, extensions=[MicroBatches([16, 8][dist.get_rank()])])
    assert error.startswith("ValueError: rank 1's shuffler has") and "all ranks need the same" in error


def divided(shuffler: BatchShuffler, batch: Any, plan: ShufflePlan) -> list[Any]:
    """Returns the micro-batches that the shuffler's only extension makes."""
    (extension,) = shuffler.extensions
    return extension.micro_batches(batch, plan)


def check_parts(parts: list[Any], moved: Any, plan: ShufflePlan) -> None:
    """Checks the samples of micro-batches; one without samples has a row of padding, or a copy of a row."""
    every = contents(moved)
    for part, rows in zip(parts, rows_of_micro_batches(plan, dist.get_rank()), strict=True):
        check_shared(part, moved)
        got = contents(part)
        assert got[: len(rows)] == [every[row] for row in rows]
        if isinstance(part, MixedBatch):
            assert (part.batch_size, part.num_samples) == (max(len(rows), 1), len(rows))
        else:
            assert len(got) == max(len(rows), 1)


def _divide(case: Case) -> ShufflePlan | None:
    """Checks micro-batches, and values of them that come back, with rows for their padding or without."""
    step, alone = exchanged(case), ("scores", "keyed", "tokens", "right")[case.seed % 4]
    if step is None:
        return None
    shuffler, plan, _, moved = step
    (micro,) = shuffler.extensions
    check_divided(plan, micro.max_tokens)
    of_ranks = [
        [samples[rows] for rows in rows_of_micro_batches(plan, rank)]
        for rank, samples in enumerate(plan.partition)
    ]
    for of_rank in of_ranks:
        loads = [plan.rows.workloads[samples].sum() for samples in of_rank]
        assert loads == sorted(loads)
    imbalance = micro_batch_imbalance(plan.rows.workloads, of_ranks)
    assert micro.report(plan) == {"micro_batches": plan.num_parts, "micro_batch_imbalance": imbalance}
    parts = micro.micro_batches(moved, plan)
    check_parts(parts, moved, plan)
    check_identical(micro.join_values(parts, plan), moved)
    outputs = [model_outputs(micro_batch, padded=case.seed % 3 > 0) for micro_batch in parts]
    expected = model_outputs(moved, padded=False)
    check_identical(micro.join_values(outputs, plan), expected)
    check_identical(micro.join_values([output[alone] for output in outputs], plan), expected[alone])
    return plan


@given(
    case=st.sampled_from([2, 3, 3, 4]).flatmap(
        lambda ranks: cases(ranks, extensions=[[MicroBatches(cap)] for cap in (1, 6, 12, 13, 30, 10**6)])
    )
)
def test_every_sample_is_in_one_micro_batch_and_the_lightest_come_first(pools, case):
    plans = pools(len(case.batches)).run(_divide, case)
    assert plans == plans[:1] * len(plans)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_any_container_is_divided(kind):
    rank, counts = dist.get_rank(), []
    for seed, (cap, rows) in enumerate(product((4, 9, 10**6), ((6, 3, 1), (1, 2, 1), (2, 5, 4)))):
        shuffler = ContainerShuffler(extensions=[MicroBatches(cap)])
        batch = make_batch(kind, seed, 1000 * (rank + 1), rows[rank])
        plan = shuffler.plan(batch)
        check_divided(plan, cap)
        moved = shuffler.exchange(batch, plan)
        check_parts(divided(shuffler, moved, plan), moved, plan)
        counts.append(plan.num_parts)
    assert max(counts[:6]) > 1 and counts[6:] == [1] * 3


def _collectives(exchange: str, cap: int | None) -> list[str]:
    """Returns those of a step; to divide and join takes none, and to divide waits for no device."""
    shuffler = DictShuffler(exchange=exchange, extensions=in_micro_batches(cap))
    shuffler.shuffle(many_fields(0))
    batch = many_fields(1)
    with recorded_collectives() as calls:
        plan = shuffler.plan(batch)
        moved = shuffler.exchange(batch, plan)
        for micro in shuffler.extensions:
            with no_synchronization():
                parts = micro.micro_batches(moved, plan)
            assert len(parts) > 1
            micro.join_values(parts, plan)
    assert plan.moves
    return [name for name, _ in calls]


@pytest.mark.parametrize("exchange", BOTH)
def test_micro_batches_take_no_collective_and_never_wait_for_the_device(pools, exchange):
    whole, divided = (pools(3).run(_collectives, exchange, cap) for cap in (None, 9))
    assert divided == whole and all(map(len, whole))


@on_ranks(2)
def test_values_of_other_micro_batches_are_refused():
    (micro,) = extensions = [MicroBatches(13)]
    plan = FieldShuffler(extensions=extensions).plan(lopsided_batch())
    values = [torch.zeros(len(rows)) for rows in rows_of_micro_batches(plan, dist.get_rank())]
    count = len(values)
    assert count > 1
    for wrong, words in (
        (values[1:], "zip"),
        ([*values[:-1], torch.zeros(len(values[-1]) + 7)], "give join_values a row for each row of the part"),
        ([*values[:-1], values[-1].int()], f"batches 0 and {count - 1} differ: "),
        ([[each, each] for each in values], "list of 2 similar entries"),
    ):
        assert words in error_of(micro.join_values, wrong, plan)


def _histories(lengths: list[int]) -> dict:
    """Makes a batch of samples of so many tokens and equal cost."""
    ids = KeyedJaggedTensor(["items"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))
    return {"ids": ids, "workload": torch.ones(len(lengths), dtype=torch.int64)}


@on_ranks(3)
def test_rank_0_names_a_sample_above_the_cap_and_its_rank_once_until_a_longer_one_comes():
    shuffler = DictShuffler(extensions=[MicroBatches(20)])
    for *lengths, named in (
        ([3, 20], [3], [3], None),
        ([2, 30], [4, 5, 99, 7], [98], "row 2 of a batch of rank 1 has 99 tokens, above"),
        ([98], [99], [9, 9], None),
        ([2, 101], [3], [3], "row 1 of a batch of rank 0 has 101 tokens, above"),
    ):
        with warnings_of("commons.extensions.micro_batches.micro_batches") as messages:
            check_divided(shuffler.plan(_histories(lengths[dist.get_rank()])), 20)
        assert len(messages) == (named is not None and dist.get_rank() == 0)
        assert all(named in message and "MicroBatches.max_tokens=20" in message for message in messages)


@on_ranks(3)
def test_counts_follow_samples_into_their_micro_batches():
    rng, shuffler = np.random.default_rng(dist.get_rank()), TokenShuffler(extensions=[MicroBatches(20)])
    most = 0
    for _ in range(4):
        loaded = draw_histories(rng, 4)
        plan = shuffler.plan(loaded)
        parts = divided(shuffler, shuffler.exchange(loaded, plan), plan)
        assert [name for one in parts for name in wrong_counts_on_host(one)] == []
        most = max(most, len(parts))
    assert most > 1


@pytest.mark.parametrize("identity", [False, True])
@on_ranks(3)
def test_groups_of_ranks_have_as_many_micro_batches_as_the_largest_needs(identity):
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    cap = {"extensions": [MicroBatches(13)]}
    shuffler = IdentityShuffler(**cap) if identity else FieldShuffler(pairs[dist.get_rank() % 2], **cap)
    alone = shuffler.plan(lopsided_batch()).num_parts
    shuffler.plan_over(RankGroup.of())
    counts = [(0, 0)] * 3
    dist.all_gather_object(counts, (alone, shuffler.plan(lopsided_batch()).num_parts))
    of_each, in_step = map(set, zip(*counts, strict=True))
    assert min(of_each) > 0 and in_step == {max(of_each)}


@on_ranks(2)
def test_a_rank_without_samples_repeats_its_only_row_in_each_micro_batch():
    shuffler = IdentityShuffler(extensions=[MicroBatches(9)])
    shuffler.plan_over(RankGroup.of())
    loaded = _histories([4, 4, 4]) if dist.get_rank() == 0 else None
    plan = shuffler.plan(loaded)
    batch = shuffler.exchange(shuffler.padding_batch() if loaded is None else loaded, plan)
    parts = divided(shuffler, batch, plan)
    for number, part in enumerate(parts):
        check_own_memory(part, *parts[number + 1 :])
    rows = [part["ids"].stride() for part in parts]
    assert len(rows) == 2 and (sum(rows) == 3 if dist.get_rank() == 0 else rows == [1, 1])


def test_micro_batches_of_one_rank_leave_the_elements_of_padding_out():
    batch = histories([1, 2, 3, 2])
    batch.actual_batch_size = 3  # one rank's batch runs as it was loaded: its fourth row has elements
    shuffler = TokenShuffler(extensions=[MicroBatches(max_tokens=8)])
    plan = shuffler.plan(batch)
    parts = divided(shuffler, shuffler.exchange(batch, plan), plan)
    assert len(parts) > 1 and sum(len(part.features.values()) for part in parts) == 3 + 2 * 6
    assert sorted(sample for part in parts for sample in contents_of_histories(part)) == sorted(
        contents_of_histories(batch)
    )


@pytest.mark.parametrize("container", ["dict", "BaseBatch"])
def test_entries_of_lists_go_with_the_rows_of_micro_batches_and_come_back(container):
    costs, texts = [9, 1, 4, 4, 1, 7], [f"text {row}" for row in range(6)]
    (micro,) = extensions = [MicroBatches(max_tokens=10)]

    class Unmoved(IdentityShuffler):
        def get_tokens(self, batch):
            return torch.tensor(costs)

    shuffler = Unmoved(extensions=extensions)
    batch = CONTAINERS[container](torch.arange(6), texts)
    plan = shuffler.plan(batch)
    parts = micro.micro_batches(shuffler.exchange(batch, plan), plan)
    assert len(parts) > 1
    rows_of_each = [ids_of(part).tolist() for part in parts]
    of_parts = [part["more"] if container == "dict" else part.more for part in parts]
    assert of_parts == [[texts[row] for row in rows] for rows in rows_of_each]
    values = [
        {"texts": of_part, "hashes": np.array(rows) + 2**60 + 1, "fixed": ["a"] * 9}
        for of_part, rows in zip(of_parts, rows_of_each, strict=True)
    ]
    joined = micro.join_values(values, plan)
    assert joined["texts"] == texts and joined["hashes"].tolist() == [row + 2**60 + 1 for row in range(6)]
    assert micro.join_values(of_parts, plan) == texts


def test_no_step_compiles():
    setup = "from commons.extensions.micro_batches.micro_batches import MicroBatches, divide"
    before, after = before_and_after_placing(
        f"{setup}; extensions = [MicroBatches(100)]", then="divide(plan, 100)", partitioner="refined"
    )
    assert before == after and len(before) > 4
