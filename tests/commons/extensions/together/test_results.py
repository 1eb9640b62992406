"""Results come back to their rows from other ranks, micro-batches, and the chunks of a controller."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.distributed import Extension, ShufflePlan
from commons.extensions.controller import merge, split_balanced
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.unshuffle import Unshuffle
from tests.commons.distributed.errors_and_warnings import error_of_all
from tests.commons.distributed.field_kinds import (
    MORE_CONTAINERS,
    ROWS,
    Columns,
    HeavyOnRank1,
    check_some_moved,
    every_kind_and_more,
    naming,
    of_every_dtype,
    own_ids,
    unfilled_memory,
)
from tests.commons.distributed.loaded_batches import check_identical
from tests.on_ranks import on_ranks

Compute = Callable[[torch.Tensor], Any]


def exchanged(extension: Extension, shared: Sequence[str]) -> tuple[dict[str, Any], ShufflePlan]:
    shuffler = HeavyOnRank1(shared=shared, extensions=[extension])
    ids = own_ids()
    batch = {"ids": ids, "items": JaggedTensor(ids.repeat_interleave(2), lengths=torch.full((ROWS,), 2))}
    batch |= {name: torch.ones(3) for name in shared}
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(batch, plan)
    check_some_moved(moved["ids"])
    return moved, plan


def unshuffled(compute: Compute, shared: Sequence[str] = ()) -> tuple[Callable[[], Any], torch.Tensor]:
    """Returns what brings the results for rows back to their ranks, and the numbers of these rows."""
    unshuffle = Unshuffle()
    moved, plan = exchanged(unshuffle, shared)
    results = compute(moved["ids"])
    return lambda: unshuffle.unshuffle(results, plan), own_ids()


def joined(compute: Compute, shared: Sequence[str] = ()) -> tuple[Callable[[], Any], torch.Tensor]:
    """Returns what joins the results of micro-batches, and the numbers of the rows."""
    micro = MicroBatches(max_tokens=4)
    moved, plan = exchanged(micro, shared)
    results = [compute(part["ids"]) for part in micro.micro_batches(moved, plan)]
    assert len(results) > 1
    return lambda: micro.join_values(results, plan), moved["ids"]


def merged(compute: Compute) -> tuple[Callable[[], Any], torch.Tensor]:
    """Returns what merges the results of chunks, and the numbers of the rows."""
    chunks, order = split_balanced({"ids": own_ids()}, 2, HeavyOnRank1())
    results = [compute(chunk["ids"]) for chunk in chunks]
    return lambda: merge(results, order), own_ids()


WAYS = [unshuffled, joined, merged]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_every_kind_of_result_comes_back_in_any_container(way: Callable[..., Any]):
    for container in ("dict", "tuple", "named tuple", "dataclass", "TensorDict", "UserDict"):
        with naming(container):
            come_back, ids = way(
                lambda ids, make=MORE_CONTAINERS[container]: make(ids, every_kind_and_more(ids))
            )
            check_identical(come_back(), MORE_CONTAINERS[container](ids, every_kind_and_more(ids)))
    with unfilled_memory():
        come_back, ids = way(of_every_dtype)
        check_identical(come_back(), of_every_dtype(ids))


@on_ranks(2)
def test_a_result_that_is_called_like_a_shared_field_goes_to_its_sample():
    come_back, ids = joined(lambda ids: {"ids": ids, "scale": 10 * ids}, ["scale"])
    check_identical(come_back(), {"ids": ids, "scale": 10 * ids})


class SubclassedDict(dict):
    pass


@dataclass
class Doubled:
    ids: torch.Tensor

    def __post_init__(self) -> None:
        self.ids = self.ids * 2


def _with_logits(ids: torch.Tensor) -> SubclassedDict:
    result = SubclassedDict(ids=ids)
    result.logits = ids.clone()
    return result


def _after_others(ids: torch.Tensor) -> JaggedTensor:
    """Makes rows of one value each, after two values that belong to none of them."""
    values = torch.cat([torch.tensor([-1, -1]), ids])
    return JaggedTensor(values, offsets=torch.arange(len(ids) + 1) + 2)


REFUSED: Mapping[str, tuple[Compute, str, str]] = {
    "an attribute": (_with_logits, "TypeError: logits ", "make it a field"),
    "changed again": (Doubled, "TypeError: ids changes ", "register_batch_type"),
    "after others": (_after_others, "ValueError: ", "first row starts at 2"),
    "a loss": (lambda ids: {"ids": ids, "loss": torch.tensor(1.0)}, "ValueError: ", "leave it out"),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_results_that_would_change_or_leave_something_behind_are_refused_by_all_ranks(
    way: Callable[..., Any],
):
    for kind, (compute, begins, remedy) in REFUSED.items():
        with naming(kind):
            error = error_of_all(way(compute)[0])
            assert error.startswith(begins) and remedy in error, error


@on_ranks(2)
def test_unshuffle_refuses_what_the_shuffler_shares_and_lists_of_tasks():
    error = error_of_all(unshuffled(lambda ids: {"ids": ids, "scale": ids}, ["scale"])[0])
    assert error.startswith("ValueError: unshuffle got ['scale']") and "another name" in error
    error = error_of_all(unshuffled(lambda ids: [ids, ids])[0])
    assert error.startswith("TypeError: ") and "Make it a tuple" in error
    come_back, ids = unshuffled(lambda ids: (ids, -ids), ["scale"])
    check_identical(come_back(), (ids, -ids))


@pytest.mark.parametrize("kind", [float, str, np.float64])
@on_ranks(2)
def test_numbers_and_texts_that_parts_differ_in_are_refused(kind):
    parts = itertools.count()
    error = error_of_all(joined(lambda ids: {"ids": ids, "loss": kind(next(parts))})[0])
    assert error.startswith("ValueError: batches 0 and 1 differ in 'loss'") and "leave it out" in error
    come_back, ids = joined(lambda ids: {"ids": ids, "loss": kind(3)})
    check_identical(come_back(), {"ids": ids, "loss": kind(3)})


@pytest.mark.parametrize("container", MORE_CONTAINERS)
def test_every_kind_of_field_is_split_and_merged_in_any_container(container: str):
    make, ids = MORE_CONTAINERS[container], torch.arange(7)
    chunks, order = split_balanced(make(ids, every_kind_and_more(ids)), 3, ids)
    for chunk, samples in zip(chunks, order.partition, strict=True):
        if container != "BaseBatch":  # whose chunks have padding
            check_identical(chunk, make(ids[samples], every_kind_and_more(ids[samples])))
    check_identical(merge(chunks, order), make(ids, every_kind_and_more(ids)))


def test_a_split_mapping_around_a_dict_stays_as_loaded_and_texts_in_an_attribute_are_refused():
    batch = Columns({"ids": torch.arange(4)})
    split_balanced(batch, 2, [1] * 4)
    assert batch["ids"].tolist() == [0, 1, 2, 3]
    named = SubclassedDict(ids=torch.arange(4))
    named.texts = ["a", "b", "c", "d"]
    with pytest.raises(TypeError, match="texts has an entry for each row"):
        split_balanced(named, 2, [1] * 4)
