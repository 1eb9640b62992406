"""With `Verification`, ranks notice that they disagree, and all of them say so."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.extension import Extension
from commons.extensions.verification import Verification
from commons.sequence_batch.packed_rows import select_rows
from tests.commons.distributed.container_batches import KINDS, ContainerShuffler, make_batch
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import BOTH, PAYLOAD, lopsided_batch, many_fields
from tests.commons.distributed.shufflers import Case, DictShuffler, FieldShuffler, cases, exchanged
from tests.commons.sequence_batch.drawn_fields import draw_fields
from tests.drawn_batches import MixedBatch
from tests.on_ranks import on_ranks


def _verified(case: Case) -> None:
    step = exchanged(case)
    if step is not None:
        _, plan, _, moved = step
        assert moved.num_samples == plan.num_placed[dist.get_rank()]


@settings(max_examples=20, deadline=None)
@given(case=st.sampled_from([2, 3]).flatmap(lambda ranks: cases(ranks, extensions=[[Verification()]])))
def test_right_steps_pass(pools, case):
    pools(len(case.batches)).run(_verified, case)


class Equal(FieldShuffler):
    def get_workloads(self, batch):
        return torch.ones(self.view(batch).num_rows, dtype=torch.int64)


def _verified_fields(seeds: list[int]) -> None:
    rank = dist.get_rank()
    for seed in seeds:
        rng = np.random.default_rng((seed, rank))
        fields = draw_fields(seed, rng, 1 + 5 * rank)
        moved = Equal(extensions=[Verification()]).shuffle(fields)
        assert set(moved) == set(fields)


def test_fields_of_any_kind_and_dtype_pass(pools):
    pools(2).run(_verified_fields, list(range(60)))


@pytest.mark.parametrize("kind", KINDS)
def test_any_container_passes(pools, kind):
    pools(2).run(_verified_container, kind)


def _verified_container(kind: str) -> None:
    rank = dist.get_rank()
    ContainerShuffler(extensions=[Verification()]).shuffle(
        make_batch(kind, 0, 1000 * (rank + 1), 2 + 3 * rank)
    )


def _verified_without_a_batch(kind: str) -> None:
    """Rank 1's loader ends after the first step, and it runs a copy of a row."""
    shuffler, rank = ContainerShuffler(extensions=[Verification()]), dist.get_rank()
    batches = [make_batch(kind, 0, 1000 * (rank + 1) + step, 4) for step in (0, 100)]
    for batch in (batches[0], None if rank else batches[1]):
        plan = shuffler.plan(batch)
        shuffler.exchange(shuffler.padding_batch() if batch is None else batch, plan)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_a_batch_passes(pools, kind):
    pools(2).run(_verified_without_a_batch, kind)


def _collectives(exchange: str) -> list[str]:
    verification = Verification()
    shuffler = DictShuffler(exchange=exchange, extensions=[verification])
    shuffler.shuffle(many_fields(0))
    names = {
        id(shuffler.planner._gather._channel): "planning",
        id(verification._planning): "plans",
        id(verification._exchanging): "checks",
    }
    names[id(shuffler.group.group_for("exchange", torch.device("cpu")))] = "exchange"
    batch = many_fields(1)
    with recorded_collectives() as calls:
        shuffler.exchange(batch, shuffler.plan(batch))
    return [f"{name} on {names[id(arguments['group'])]}" for name, arguments in calls]


@pytest.mark.parametrize("exchange", BOTH)
def test_verifying_takes_one_more_to_plan_and_two_to_exchange(pools, exchange):
    planning, plans, checks = (f"all_gather on {name}" for name in ("planning", "plans", "checks"))
    for calls in pools(2).run(_collectives, exchange):
        assert calls == [planning, plans, checks, f"{PAYLOAD[exchange]} on exchange", checks]


class Different(Extension):
    """From the second plan on, rank 1 swaps the samples of the first two ranks."""

    name, order = "different", 5
    plans = 0

    def place(self, rows, place):
        plan = place(rows)
        self.plans += 1
        if self.plans == 1 or dist.get_rank() != 1:
            return plan
        swapped = np.where(plan.destination < 2, 1 - plan.destination, plan.destination)
        return dataclasses.replace(plan, destination=swapped)


def _different_plans() -> str:
    shuffler = FieldShuffler(extensions=[Different(), Verification()])
    shuffler.plan(lopsided_batch())
    return error_of(shuffler.plan, lopsided_batch())


def test_ranks_with_different_plans_all_name_both_hashes(pools):
    error, *elsewhere = pools(3).run(_different_plans)
    assert elsewhere == [error] * 2
    found = re.match(
        r"RuntimeError: ranks have different plans for one step: its hash is (0x[0-9a-f]+) on rank 0 and "
        r"(0x[0-9a-f]+) on rank 1 of the ranks",
        error,
    )
    assert found and found[1] != found[2]


def _fingerprints(loads: list[list[int]]) -> list[int]:
    shuffler = FieldShuffler(extensions=[Verification()])
    fingerprints = []
    for of_step in loads:
        batch = lopsided_batch()
        batch.workload = torch.tensor(of_step) * (1 + dist.get_rank())
        fingerprints.append(shuffler.plan(batch).fingerprint)
    return fingerprints


def test_only_equal_plans_have_equal_hashes(pools):
    first, *others = pools(2).run(_fingerprints, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]])
    assert [first] == others
    assert first[0] == first[2] != first[1]


class Wrong(FieldShuffler):
    """Its exchange drops or doubles samples."""

    change = 0

    def _move_rows(self, loaded, plan):
        moved = super()._move_rows(loaded, plan)
        packed, rows = self.view(moved).packed(), len(plan.computed_by(self.group.rank))
        return select_rows([packed], np.arange(rows + self.change) % rows)


def _error_of_a_wrong_exchange(exchange: str, change: int) -> str:
    """On rank 1, the exchange drops or doubles a sample."""
    shuffler = Wrong(exchange=exchange, extensions=[Verification()])
    shuffler.change = change if dist.get_rank() == 1 else 0
    batch = lopsided_batch()
    plan = shuffler.plan(batch)
    assert plan.moves
    return error_of(shuffler.exchange, batch, plan)


def _errors_of_wrong_exchanges() -> list[str]:
    return [_error_of_a_wrong_exchange(exchange, change) for exchange in BOTH for change in (-1, 1)]


def test_a_sample_that_one_rank_loses_or_doubles_is_an_error_on_all(pools):
    expected = [
        f"RuntimeError: rank 1 of the ranks to balance among has {count} samples after the exchange, "
        "expected 4"
        for _ in BOTH
        for count in (3, 5)
    ]
    assert pools(3).run(_errors_of_wrong_exchanges) == [expected] * 3


class Shortening(DictShuffler):
    """On rank 1, its exchange drops a row of one field."""

    def get_workloads(self, batch):
        return torch.ones(2, dtype=torch.int64)

    def _move_rows(self, loaded, plan):
        moved = super()._move_rows(loaded, plan)
        return moved | {"b": moved["b"][: 2 - dist.get_rank()]}


@on_ranks(2)
def test_a_row_that_one_field_loses_is_an_error_on_all_ranks():
    batch = {"a": torch.arange(2), "b": torch.arange(2)}
    error = error_of(Shortening(extensions=[Verification()]).shuffle, batch)
    assert error.startswith("RuntimeError: rank 1 of the ranks to balance among has 1 samples after the")


class Regrouping(DictShuffler):
    """On rank 1, its exchange gives a row's values to other keys."""

    def get_workloads(self, batch):
        return torch.ones(1, dtype=torch.int64)

    def _move_rows(self, loaded, plan):
        moved = super()._move_rows(loaded, plan)
        if dist.get_rank() == 1:
            ids = moved["ids"]
            lengths = ids.lengths().flip(0)
            moved["ids"] = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=lengths, stride=1)
        return moved


def _error_of_other_lengths() -> str:
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([2, 1]))
    return error_of(Regrouping(extensions=[Verification()]).shuffle, {"ids": ids})


def test_a_row_with_other_lengths_is_an_error_on_all_ranks(pools):
    for error in pools(2).run(_error_of_other_lengths):
        assert "row 0 of rank 1 has changed in the exchange to rank" in error


@dataclasses.dataclass
class Clamping(MixedBatch):
    """Clamps a field on rank 1, which changes no row of the first batch."""

    def __post_init__(self) -> None:
        if dist.is_initialized() and dist.get_rank() == 1:
            self.matrix.clamp_(max=5000)
        super().__post_init__()


def _error_of_a_changing_batch() -> str:
    def batch(factor: int) -> Clamping:
        fields = vars(lopsided_batch())
        made = Clamping(**{spec.name: fields[spec.name] for spec in dataclasses.fields(Clamping)})
        made.matrix *= factor
        return made

    shuffler = FieldShuffler(extensions=[Verification()])
    shuffler.shuffle(batch(1))
    return error_of(shuffler.shuffle, batch(6))


def test_a_batch_that_changes_its_rows_when_made_again_is_an_error_on_all_ranks(pools):
    for error in pools(2).run(_error_of_a_changing_batch):
        assert re.match(r"RuntimeError: row \d of rank 0 has changed in the exchange to rank 1", error)


class Unpicklable(Exception):
    def __init__(self, one, two) -> None:
        super().__init__(f"{one} and {two}")
        self.held = lambda: None


class Raising(Extension):
    """On rank 1, placing raises in some steps."""

    name, order = "raising", 5

    def __init__(self, errors):
        self.errors = errors

    def place(self, rows, place):
        error = self.errors.pop(0)
        if error is not None and dist.get_rank() == 1:
            raise error
        return place(rows)


def _errors_of_placing() -> list[str]:
    """Returns the errors of three steps, and that of one whose error does not pickle."""
    errors = [None, LookupError("no such placement"), None, Unpicklable("this", "that")]
    shuffler = FieldShuffler(extensions=[Raising(errors), Verification()])
    return [error_of(shuffler.plan, lopsided_batch()) for _ in range(4)]


def test_an_error_of_placing_on_one_rank_is_raised_on_all(pools):
    for rank, (first, error, after, in_words) in enumerate(pools(3).run(_errors_of_placing)):
        assert first == after == "no error"
        assert error.startswith("LookupError: no such placement")
        assert rank == 1 or "raised on rank 1:" in error
        kind = "Unpicklable" if rank == 1 else "RuntimeError: Unpicklable"
        assert in_words.startswith(f"{kind}: this and that")
