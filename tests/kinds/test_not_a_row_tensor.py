"""What is not simply a tensor with one row per sample travels with its samples, or all ranks refuse it."""

from __future__ import annotations

import pickle
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict, tensorclass
from torch import nn
from torch.utils.data import default_collate
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler, ShufflePlan
from commons.distributed.extension import Extension
from commons.extensions.controller import merge, split_balanced
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.unshuffle import Unshuffle
from commons.sequence_batch import BaseBatch, register_batch_type
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.pipeline.ranking_pipelines import pipeline_of, steps_of
from tests.on_ranks import on_ranks

ROWS = 4
LABELS_PER_ROW = [1, 0, 3, 3]


class HeavyOnRank1(BatchShuffler):
    """Rows of rank 1 cost more, so that some move."""

    def __init__(self, shared: Sequence[str] = (), extensions: Sequence[Extension] = ()) -> None:
        self.shared_fields = shared
        super().__init__(extensions=extensions)

    def get_workloads(self, batch):
        return torch.full((self.view(batch).num_rows,), 1 + 9 * dist.get_rank())


def own_ids() -> torch.Tensor:
    return torch.arange(ROWS) + ROWS * dist.get_rank()


def as_jagged(ids: torch.Tensor) -> JaggedTensor:
    """Makes rows of two values each."""
    return JaggedTensor(ids.repeat_interleave(2), lengths=torch.full((len(ids),), 2))


def right_or_refused(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a call returns; None if it raises a TypeError or ValueError, as it must on all ranks."""
    try:
        result = function(*args)
    except (TypeError, ValueError):
        result = None
    refused: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(refused, result is None)
    assert len(set(refused)) == 1, "some ranks refuse what others take"
    return result


def check_some_moved(ids: torch.Tensor) -> None:
    assert len(ids) and ids.tolist() != own_ids().tolist()


def _collated() -> dict[str, Any]:
    return default_collate([{"id": int(number), "name": f"user {number}"} for number in own_ids()])


def _tensordict() -> TensorDict:
    batch = TensorDict({"id": own_ids()}, batch_size=[ROWS])
    batch.set_non_tensor("name", np.array([f"user {number}" for number in own_ids()], dtype=object))
    return batch


@pytest.mark.parametrize("make", [_collated, _tensordict])
@on_ranks(2)
def test_one_string_per_row_travels_with_its_row(make: Callable[[], Any]):
    moved = right_or_refused(HeavyOnRank1().shuffle, make())
    if moved is not None:
        check_some_moved(moved["id"])
        assert list(moved["name"]) == [f"user {number}" for number in moved["id"]]


class Columns(MutableMapping):
    """A mapping around a dict, as many libraries have."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._columns[name]

    def __setitem__(self, name: str, column: torch.Tensor) -> None:
        self._columns[name] = column

    def __delitem__(self, name: str) -> None:
        del self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _shuffled(batch: Columns) -> torch.Tensor:
    return HeavyOnRank1().shuffle(batch)["id"]


def _split(batch: Columns) -> torch.Tensor:
    chunks, _ = split_balanced(batch, 2, [1] * ROWS)
    return torch.cat([chunk["id"] for chunk in chunks])


@pytest.mark.parametrize("moved_by", [_shuffled, _split])
@on_ranks(2)
def test_a_mapping_around_a_dict_is_not_overwritten_and_loses_no_row(moved_by: Callable[..., Any]):
    batch = Columns({"id": own_ids()})
    moved = right_or_refused(moved_by, batch)
    assert batch["id"].tolist() == own_ids().tolist()
    if moved is not None:
        every: list[Any] = [None, None]
        dist.all_gather_object(every, moved.tolist())
        assert sorted(every[0] + every[1]) == list(range(2 * ROWS))


class SubclassedDict(dict):
    pass


class SlottedDict(dict):
    __slots__ = ("mask",)


@pytest.mark.parametrize(("of", "nested"), [(UserDict, False), (SlottedDict, False), (SubclassedDict, True)])
@on_ranks(2)
def test_a_tensor_that_only_an_attribute_holds_does_not_stay_behind(of: type, nested: bool):
    batch = of(id=own_ids())
    batch.mask = {"of items": own_ids()} if nested else own_ids()
    moved = right_or_refused(HeavyOnRank1().shuffle, batch)
    if moved is not None:
        check_some_moved(moved["id"])
        mask = moved.mask["of items"] if nested else moved.mask
        assert mask.tolist() == moved["id"].tolist()


@dataclass(frozen=True)
class FeatureName:
    """A key that shows its name without its version."""

    name: str
    version: int

    def __repr__(self) -> str:
        return self.name


@on_ranks(2)
def test_fields_under_two_keys_that_look_alike_both_travel():
    old, new = FeatureName("item", 1), FeatureName("item", 2)
    moved = right_or_refused(HeavyOnRank1().shuffle, {old: own_ids(), new: own_ids() + 100})
    if moved is not None:
        check_some_moved(moved[old])
        assert (moved[old] + 100).tolist() == moved[new].tolist()


def exchanged(extension: Extension, shared: Sequence[str] = ()) -> tuple[dict[str, Any], ShufflePlan]:
    shuffler = HeavyOnRank1(shared, [extension])
    batch = {"id": own_ids(), "items": as_jagged(own_ids()), "scale": torch.ones(3)}
    batch = batch if shared else {name: batch[name] for name in ("id", "items")}
    plan = shuffler.plan(batch)
    return shuffler.exchange(batch, plan), plan


def unshuffled(compute: Callable[[torch.Tensor], Any], shared: Sequence[str] = ()) -> tuple[Any, Any]:
    """Returns what is computed of ids, back in their order; and these ids."""
    unshuffle = Unshuffle()
    moved, plan = exchanged(unshuffle, shared)
    check_some_moved(moved["id"])
    return right_or_refused(unshuffle.unshuffle, compute(moved["id"]), plan), own_ids()


def joined(compute: Callable[[torch.Tensor], Any], shared: Sequence[str] = ()) -> tuple[Any, Any]:
    """Returns what is computed of ids in micro-batches, joined; and these ids."""
    micro = MicroBatches(max_tokens=4)
    moved, plan = exchanged(micro, shared)
    parts = micro.micro_batches(moved, plan)
    assert len(parts) > 1
    results = [compute(part["id"]) for part in parts]
    return right_or_refused(micro.join_values, results, plan), moved["id"]


def merged(compute: Callable[[torch.Tensor], Any], shared: Sequence[str] = ()) -> tuple[Any, Any]:
    """Returns what is computed of ids in chunks, merged; and these ids."""
    batch = {"id": own_ids(), "scale": torch.ones(3)}
    chunks, order = split_balanced(batch, 2, HeavyOnRank1(shared))
    return right_or_refused(merge, [compute(chunk["id"]) for chunk in chunks], order), own_ids()


@pytest.mark.parametrize("put_together", [unshuffled, joined, merged])
@on_ranks(2)
def test_a_result_that_is_called_like_a_shared_field_goes_to_its_sample(put_together: Callable[..., Any]):
    results, ids = put_together(lambda ids: {"id": ids, "scale": 10 * ids}, ["scale"])
    if results is not None:
        assert results["id"].tolist() == ids.tolist()
        assert results["scale"].tolist() == (10 * ids).tolist()


def _after_others(ids: torch.Tensor) -> JaggedTensor:
    """Makes rows of one value each, after two values that belong to none of them."""
    values = torch.cat([torch.tensor([-1, -1]), ids])
    return JaggedTensor(values, offsets=torch.arange(len(ids) + 1) + 2)


@pytest.mark.parametrize("put_together", [unshuffled, joined])
@on_ranks(2)
def test_jagged_results_that_start_within_their_values_are_cut_where_they_start(
    put_together: Callable[..., Any],
):
    assert [row.tolist() for row in _after_others(torch.tensor([5, 6])).to_dense()] == [[5], [6]]
    results, ids = put_together(_after_others)
    if results is not None:
        assert [row.tolist() for row in results.to_dense()] == [[number] for number in ids.tolist()]


def _nested(lengths: torch.Tensor) -> torch.Tensor:
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(torch.ones(int(lengths.sum())), offsets)


def _jagged(lengths: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(torch.ones(int(lengths.sum())), lengths=lengths)


def one_id_per_row() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["item"], own_ids(), lengths=torch.ones(ROWS, dtype=torch.int64))


@pytest.mark.parametrize("make", [_nested, _jagged])
@on_ranks(2)
def test_each_label_of_a_base_batch_counts_once_whatever_holds_it(make: Callable[..., Any]):
    labels = make(torch.tensor(LABELS_PER_ROW))
    plan = right_or_refused(lambda: HeavyOnRank1().plan(BaseBatch(one_id_per_row(), ROWS, {}, labels=labels)))
    assert plan is None or plan.num_loss_tokens == 2 * sum(LABELS_PER_ROW)


def _texts(ids: torch.Tensor) -> dict[str, Any]:
    return {"answer": [f"answer {number}" for number in ids.tolist()], "id": ids}


def _hashes(ids: torch.Tensor) -> dict[str, Any]:
    return {"answer": np.array([2**60 + 1 + number for number in ids.tolist()]), "id": ids}


@pytest.mark.parametrize(("compute", "num_chunks"), [(_texts, 2), (_hashes, ROWS + 1)])
@on_ranks(2)
def test_merged_results_that_are_no_tensors_are_those_of_their_samples(
    compute: Callable[..., Any], num_chunks: int
):
    chunks, order = split_balanced({"id": own_ids()}, num_chunks, [1] * ROWS)
    results = right_or_refused(merge, [compute(chunk["id"]) for chunk in chunks], order)
    if results is not None:
        assert results["id"].tolist() == own_ids().tolist()
        expected = compute(own_ids())["answer"]
        assert np.asarray(results["answer"]).tolist() == np.asarray(expected).tolist()


class Scores(nn.Module):
    """Scores each row, and returns the scores as `convert` makes them."""

    def __init__(self, convert: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.convert, self.weight = convert, nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        scores = batch["id"] * self.weight
        return scores, self.convert(scores.detach())


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.tolist])
@on_ranks(2)
def test_an_evaluated_rank_without_samples_has_no_scores_that_are_no_tensors(convert: Callable[..., Any]):
    model = Scores(convert).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = pipeline_of("none", model, optimizer, HeavyOnRank1())
    batches = [{"id": own_ids()[:1]}] if dist.get_rank() == 0 else []
    with torch.no_grad():
        lengths = [(len(output), pipeline.num_samples) for *_, output in steps_of(pipeline, batches)]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, lengths)
    assert sorted(num_samples for ((_, num_samples),) in every) == [0, 1]
    assert all(length == num_samples for ((length, num_samples),) in every), every


@dataclass
class Scored(BaseBatch):
    scores: Any = None


@tensorclass
class Tagged:
    id: torch.Tensor


def _array_of_a_base_batch() -> None:
    error = error_of(Scored, one_id_per_row(), ROWS, {}, scores=np.zeros(ROWS))
    assert error.startswith("TypeError") and "per_sample" in error, error  # it refuses shared_fields


def _loss_among_results() -> None:
    def compute(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"id": ids, "loss": torch.tensor(1.0)}

    unshuffle = Unshuffle()
    moved, plan = exchanged(unshuffle)
    if "shared_fields" in error_of(unshuffle.unshuffle, compute(moved["id"]), plan):
        unshuffle = Unshuffle()
        moved, plan = exchanged(unshuffle, ["scale", "loss"])
        assert unshuffle.unshuffle(compute(moved["id"]), plan)["id"].tolist() == own_ids().tolist()


def _tensorclass_in_a_tensordict() -> None:
    batch = TensorDict({"tagged": Tagged(id=own_ids(), batch_size=[ROWS])}, batch_size=[ROWS])
    assert "register_batch_type" in error_of(HeavyOnRank1().shuffle, batch)
    register_batch_type(
        Tagged,
        parts=lambda tagged: {"id": tagged.id},
        replaced=lambda tagged, parts: Tagged(id=parts["id"], batch_size=[len(parts["id"])]),
    )
    moved = HeavyOnRank1().shuffle(batch)
    check_some_moved(moved["tagged"].id)
    assert moved.batch_size == (len(moved["tagged"].id),)


@pytest.mark.parametrize(
    "follow", [_array_of_a_base_batch, _loss_among_results, _tensorclass_in_a_tensordict]
)
@on_ranks(2)
def test_the_remedy_that_an_error_names_works(follow: Callable[[], None]):
    follow()


@dataclass
class WithDefault:
    id: torch.Tensor
    mask = None  # no field
    scale = 1.0


@on_ranks(2)
def test_an_attribute_over_a_default_of_its_class_is_refused():
    for name, value in (("mask", own_ids()), ("scale", 2.0)):
        batch = WithDefault(own_ids())
        setattr(batch, name, value)
        assert error_of(HeavyOnRank1().shuffle, batch).startswith(f"TypeError: {name} ")


@on_ranks(2)
def test_what_a_later_batch_has_in_an_attribute_is_refused():
    shuffler = HeavyOnRank1()
    shuffler.shuffle(SubclassedDict(id=own_ids()))
    batch = SubclassedDict(id=own_ids())
    batch.mask = own_ids()
    assert "only an attribute" in error_of(shuffler.shuffle, batch)


@on_ranks(2)
def test_texts_in_an_attribute_that_differ_are_refused_and_equal_ones_shared():
    batch = SubclassedDict(id=own_ids())
    batch.names = ["a", "b"]
    assert HeavyOnRank1().shuffle(batch).names == ["a", "b"]
    batch.texts = [f"text {number}" for number in own_ids().tolist()]
    assert "texts" in error_of(HeavyOnRank1().shuffle, batch)
    with pytest.raises(TypeError, match="texts has an entry for each row"):
        split_balanced(batch, 2, [1] * ROWS)


@dataclass
class Doubled:
    id: torch.Tensor

    def __post_init__(self) -> None:
        self.id = self.id * 2


def _with_logits(ids: torch.Tensor) -> SubclassedDict:
    result = SubclassedDict(id=ids)
    result.logits = ids.clone()
    return result


@pytest.mark.parametrize("put_together", [unshuffled, joined, merged])
@pytest.mark.parametrize("compute", [_with_logits, Doubled])
@on_ranks(2)
def test_results_that_would_change_or_leave_something_behind_are_refused(
    put_together: Callable[..., Any], compute: Callable[..., Any]
):
    results, _ = put_together(compute, ["scale"])
    assert results is None


@pytest.mark.parametrize("put_together", [joined, merged])
@pytest.mark.parametrize("kind", [float, str, np.float64])
@on_ranks(2)
def test_numbers_and_texts_that_parts_differ_in_are_refused(put_together: Callable[..., Any], kind: type):
    parts = iter(range(99))
    assert put_together(lambda ids: {"id": ids, "loss": kind(next(parts))}, ["scale"])[0] is None
    results, ids = put_together(lambda ids: {"id": ids, "loss": kind(3)}, ["scale"])
    assert results["id"].tolist() == ids.tolist() and results["loss"] == kind(3)


@on_ranks(2)
def test_a_list_of_tasks_is_refused_by_all_ranks_whatever_their_rows():
    class Ones(HeavyOnRank1):
        def get_tokens(self, batch):
            return torch.ones(len(batch["id"]), dtype=torch.int64)

    unshuffle = Unshuffle()
    shuffler = Ones(extensions=[unshuffle])
    batch = {"id": torch.arange(2 + dist.get_rank())}
    plan = shuffler.plan(batch)
    moved = shuffler.exchange(batch, plan)
    assert right_or_refused(unshuffle.unshuffle, [moved["id"], moved["id"]], plan) is None
    first, second = unshuffle.unshuffle((moved["id"], moved["id"]), plan)
    assert first.tolist() == second.tolist() == batch["id"].tolist()


def test_arrays_of_numbers_and_of_texts_are_not_joined():
    _, order = split_balanced({"id": torch.arange(4)}, 2, [1] * 4)
    with pytest.raises(ValueError, match="other dtypes in 'a'"):
        merge([{"a": np.arange(2)}, {"a": np.array(["x", "y"])}], order)
    texts = merge([{"a": np.array(["x", "y"])}, {"a": np.array(["long", "z"])}], order)["a"]
    assert sorted(texts.tolist()) == ["long", "x", "y", "z"]


@dataclass
class WithCache:
    """Works a total out when it is asked for, and in some batches a mask at once."""

    id: torch.Tensor

    def __post_init__(self) -> None:
        self._total: torch.Tensor | None = None
        self.made = np.random.default_rng().random()
        if int(self.id.sum()) % 2:
            self.odd = self.id % 2

    def total(self) -> torch.Tensor:
        if self._total is None:
            self._total = self.id.sum()
        return self._total


@on_ranks(2)
def test_what_a_batch_works_out_of_its_fields_is_worked_out_again():
    shuffler = HeavyOnRank1()
    for last in (4, 5):  # the first has no mask
        batch = WithCache(torch.cat([own_ids()[:3], torch.tensor([last])]))
        batch.total()
        moved = shuffler.shuffle(batch)
        assert int(moved.total()) == int(moved.id.sum())
        assert hasattr(moved, "odd") == bool(int(moved.id.sum()) % 2)
    chunks, order = split_balanced(WithCache(own_ids()), 2, [1] * ROWS)
    assert merge(chunks, order).id.tolist() == own_ids().tolist()


@on_ranks(2)
def test_pickled_chunks_share_what_their_batch_shares_whatever_its_length():
    batch = {"id": own_ids(), "scale": torch.ones(2)}  # chunks have two rows
    chunks, order = split_balanced(batch, 2, HeavyOnRank1(["scale"]))
    sent = pickle.loads(pickle.dumps(chunks))
    assert merge(sent, order)["scale"].tolist() == [1, 1]
    zeros = [{"id": chunk["id"], "scale": torch.zeros(2)} for chunk in chunks]
    with pytest.raises(ValueError, match="it may be either"):
        merge(zeros, order)


def test_arrays_of_texts_may_have_none_and_times_other_units():
    _, order = split_balanced({"id": torch.arange(4)}, 2, [1] * 4)
    texts = merge([np.array(["a", "b"]), np.array(["c", None])], order)
    assert sorted(map(str, texts)) == ["None", "a", "b", "c"]
    times = merge([np.array(["2026", "2027"], "M8[Y]"), np.array(["2026-01-02"] * 2, "M8[D]")], order)
    assert times.dtype == np.dtype("M8[D]")
