"""With `Verification`, ranks notice that they disagree, and all of them say so."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import Extension, ShufflePlan
from commons.extensions.verification import Verification
from tests.commons.distributed.container_batches import KINDS, ContainerShuffler, make_batch
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.field_kinds import HeavyOnRank1
from tests.commons.distributed.loaded_batches import BOTH, PAYLOAD, lopsided_batch, many_fields
from tests.commons.distributed.shufflers import Case, DictShuffler, FieldShuffler, cases, exchanged
from tests.commons.sequence_batch.drawn_fields import draw_fields
from tests.few_examples import few_examples
from tests.on_ranks import on_ranks


def _verified(case: Case) -> None:
    step = exchanged(case)
    if step is not None:
        _, plan, _, moved = step
        assert moved.num_samples == plan.num_placed[dist.get_rank()]


@few_examples  # three processes each
@given(case=st.sampled_from([2, 3]).flatmap(lambda ranks: cases(ranks, extensions=[[Verification()]])))
def test_right_steps_pass(pools, case):
    pools(len(case.batches)).run(_verified, case)


@on_ranks(2)
def test_fields_of_any_kind_and_dtype_pass():
    rank = dist.get_rank()
    for seed in range(30):
        fields = draw_fields(seed, np.random.default_rng((seed, rank)), 1 + 5 * rank)
        assert set(HeavyOnRank1(extensions=[Verification()]).shuffle(fields)) == set(fields)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_any_container_passes_and_a_rank_without_a_batch(kind):
    shuffler, rank = ContainerShuffler(extensions=[Verification()]), dist.get_rank()
    shuffler.shuffle(make_batch(kind, 0, 1000 * (rank + 1), 2 + 3 * rank))
    for rows in (4, 1):  # or a single one, which leaves a rank without samples
        batch = None if rank else make_batch(kind, 0, 1100, rows)
        plan = shuffler.plan(batch)
        shuffler.exchange(shuffler.padding_batch() if batch is None else batch, plan)


@pytest.mark.parametrize("exchange", BOTH)
@on_ranks(2)
def test_verifying_takes_one_more_to_plan_and_two_to_exchange(exchange):
    verification = Verification()
    shuffler = DictShuffler(exchange=exchange, extensions=[verification])
    shuffler.shuffle(many_fields(0))
    names = {
        id(shuffler.planner.gather._channel): "planning",
        id(verification._planning): "plans",
        id(verification._exchanging): "checks",
        id(shuffler.group.group_for("exchange", torch.device("cpu"))): "exchange",
    }
    batch = many_fields(1)
    with recorded_collectives() as calls:
        shuffler.exchange(batch, shuffler.plan(batch))
    planning, plans, checks = (f"all_gather on {name}" for name in ("planning", "plans", "checks"))
    made = [f"{name} on {names[id(arguments['group'])]}" for name, arguments in calls]
    assert made == [planning, plans, checks, f"{PAYLOAD[exchange]} on exchange", checks]


class SecondPlan(Extension):
    """On rank 1, the second plan is another one."""

    name, order = "second_plan", 5

    def __init__(self, change: Callable[[ShufflePlan], ShufflePlan]) -> None:
        self.change, self.plans = change, 0

    def place(self, rows, place):
        self.plans += 1
        plan = place(rows)
        return self.change(plan) if self.plans == 2 and dist.get_rank() == 1 else plan


def _swapped(plan: ShufflePlan) -> ShufflePlan:
    """Swaps the samples of the first two ranks."""
    swapped = np.where(plan.destination < 2, 1 - plan.destination, plan.destination)
    return dataclasses.replace(plan, destination=swapped)


def _failing(plan: ShufflePlan) -> ShufflePlan:
    raise LookupError("no such placement")


@on_ranks(3)
def test_ranks_with_different_plans_name_both_hashes_and_an_error_of_one_is_raised_on_all():
    for change, expected in (
        (
            _swapped,
            r"RuntimeError: ranks have different plans for one step: its hash is (0x[0-9a-f]+) on rank 0 and "
            r"(?!\1 )0x[0-9a-f]+ on rank 1 of the ranks",
        ),
        (_failing, "LookupError: no such placement"),
    ):
        shuffler = FieldShuffler(extensions=[SecondPlan(change), Verification()])
        first, error, after = [error_of(shuffler.plan, lopsided_batch()) for _ in range(3)]
        assert first == after == "no error" and re.match(expected, error), error
        assert change is _swapped or dist.get_rank() == 1 or "raised on rank 1:" in error


@on_ranks(2)
def test_an_exchange_by_different_plans_is_an_error_on_all_ranks():
    shuffler, batch = FieldShuffler(extensions=[Verification()]), lopsided_batch()
    plan = shuffler.plan(batch)
    with pytest.raises(RuntimeError, match="different plans for one step"):
        shuffler.exchange(batch, _swapped(plan) if dist.get_rank() == 1 else plan)


def keyed(lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))


class Wrong(DictShuffler):
    """On rank 1, it changes what the exchange gives."""

    change: Callable[[dict[str, Any]], dict[str, Any]]

    def _move_rows(self, loaded, plan):
        moved = super()._move_rows(loaded, plan)
        return type(self).change(moved) if dist.get_rank() == 1 else moved


def _other_rows(change: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what drops or doubles a row of all fields."""

    def changed(moved: dict[str, Any]) -> dict[str, Any]:
        rows = torch.arange(4 + change) % 4
        dense = {name: moved[name][rows] for name in ("workload", "number")}
        return dense | {"ids": keyed([1] * 2 * len(rows))}

    return changed


def _one_shorter(moved: dict[str, Any]) -> dict[str, Any]:
    return moved | {"number": moved["number"][:-1]}


def _another_value(moved: dict[str, Any]) -> dict[str, Any]:
    return moved | {"number": moved["number"] + (torch.arange(4) == 2)}


def _other_keys(moved: dict[str, Any]) -> dict[str, Any]:
    """Counts each row's values of the second key to the first."""
    ids = moved["ids"]
    rows = zip(ids["a"].to_dense(), ids["b"].to_dense(), strict=True)
    lengths = ids.lengths().view(2, -1).sum(0)
    counted, values = torch.cat([lengths, 0 * lengths]), torch.cat([torch.cat(row) for row in rows])
    return moved | {"ids": KeyedJaggedTensor(ids.keys(), values, lengths=counted)}


COUNT = "rank 1 of the ranks to balance among has {} samples after the exchange, expected 4"
CHANGED = r"row \d of rank \d has changed in the exchange to rank 1"
WRONG = {
    "a sample is lost": (_other_rows(-1), COUNT.format(3)),
    "a sample is doubled": (_other_rows(1), COUNT.format(5)),
    "a field loses a row": (_one_shorter, COUNT.format(3)),
    "a value": (_another_value, CHANGED),
    "lengths": (_other_keys, CHANGED),
}


@pytest.mark.parametrize("name", WRONG)
@on_ranks(3)
def test_a_wrong_exchange_of_one_rank_is_an_error_on_all(name):
    change, message = WRONG[name]
    shuffler = type("Wrong", (Wrong,), {"change": change})(extensions=[Verification()])
    batch = {
        "workload": torch.arange(4) + 100 * (dist.get_rank() == 0),
        "number": torch.arange(4),
        "ids": keyed([1, 2, 1, 2, 2, 1, 2, 1]),
    }
    plan = shuffler.plan(batch)
    assert plan.moves
    assert re.match(f"RuntimeError: {message}", error_of(shuffler.exchange, batch, plan))
