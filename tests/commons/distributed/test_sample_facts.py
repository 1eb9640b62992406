"""Facts that ranks gather: costs, tokens, labels, shared fields, and types of batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.distributed import IdentityShuffler
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch, tree
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.shufflers import FieldShuffler
from tests.on_ranks import on_ranks

LENGTHS = (50_000, 70_000, 3_000, 1)  # the squares of the first two wrap in int32


def _long_histories() -> dict[str, Any]:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32).roll(dist.get_rank())
    ids = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    return {"ids": KeyedJaggedTensor(["item"], ids, lengths=lengths), "n": lengths}


class Costing(FieldShuffler):
    """The cost is a given function of the batch."""

    def __init__(self, cost, **settings: Any) -> None:
        self.get_workloads = cost  # type: ignore[method-assign]
        super().__init__(**settings)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError


def squared(batch):
    return batch["ids"].lengths() ** 2


def summed_squares(batch):
    return (batch["ids"].lengths().view(1, -1) ** 2).sum(0)


def flops(batch):
    return HSTUFlops(1, 32, 2, 16).per_sample(batch["ids"]["item"].lengths())


def in_int32(batch):
    return batch["n"] ** 2


def narrowed(batch):
    return batch["n"].int()


def _workloads() -> list[Any]:
    batch = _long_histories()
    costs = [Costing(cost).plan(batch).rows.workloads.tolist() for cost in (squared, summed_squares, flops)]
    in_int64 = Costing(in_int32).plan(batch).rows.workloads.tolist()
    return [*costs, in_int64, error_of(Costing(narrowed).plan, batch)]


def test_costs_of_int32_lengths_do_not_wrap(pools):
    squares, tiles = [n**2 for n in LENGTHS], [-(-n // 32) for n in LENGTHS]
    flops = [10 * 32**2 * n + 4 * 32**3 * m * (m + 1) // 2 for n, m in zip(LENGTHS, tiles, strict=True)]
    expected = [cost + cost[-1:] + cost[:-1] for cost in (squares, squares, flops, squares)]
    for *workloads, error in pools(2).run(_workloads):
        assert workloads == expected
        assert "returned torch.int32, in which squares and FLOPs overflow silently" in error


class Tokens(Costing):
    def get_tokens(self, batch):
        return batch["n"].long()

    def get_loss_tokens(self, batch):
        return batch["n"].long() - 1


def _tokens():
    plan = Tokens(squared).plan(_long_histories())
    return plan.rows.tokens.tolist(), plan.rows.loss_tokens.tolist()


def test_a_shuffler_counts_the_tokens_of_a_foreign_batch(pools):
    expected = [*LENGTHS, *LENGTHS[-1:], *LENGTHS[:-1]]
    for tokens, loss_tokens in pools(2).run(_tokens):
        assert tokens == expected and loss_tokens == [n - 1 for n in expected]


def _incomplete(labels: torch.Tensor, rows: int = 8, real: int = 4) -> BaseBatch:
    lengths = torch.cat([torch.ones(real), torch.zeros(rows - real)]).int()
    features = KeyedJaggedTensor(["item"], torch.zeros(real, dtype=torch.int64), lengths=lengths)
    return BaseBatch(features, rows, {"item": 1}, labels=labels, actual_batch_size=real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("num_labels", [4, 8, 12, 16, 24])
def test_flat_labels_without_padding_are_refused(num_labels, dtype):
    error = error_of(_incomplete, torch.arange(num_labels).remainder(3).to(dtype))
    assert f"labels has {num_labels} elements in one dimension, which may be those of the 4 samples" in error
    assert "labels of shape [rows, tasks], as in labels.view(4, -1), followed by zeros" in error
    assert f"[8, {num_labels // 4}]" in error
    _incomplete(torch.arange(num_labels).view(4, -1).repeat(2, 1))  # with padding, in one way


@pytest.mark.parametrize("padding", [0.0, -100.0])
@pytest.mark.parametrize("width", [0, 1, 2])
def test_flat_labels_with_padding_travel(padding, width):
    labels = torch.cat([torch.arange(4.0 * width), torch.full((4 * width,), padding)])
    selected = _incomplete(labels).index_select([3, 1])
    assert selected.labels.view(2, width).tolist() == labels.view(8, width)[[3, 1]].tolist()


@pytest.mark.parametrize("padding", [0.0, -100.0])
def test_one_label_per_row_travels_beside_padding(padding):
    labels = torch.tensor([3.0, 0.0, 5.0, 7.0, *[padding] * 4])
    assert _incomplete(labels).index_select([3, 1]).labels.tolist() == [7, 0]


class Batch:
    """Has the name of TorchRec's class."""


@dataclass
class Shared:
    ids: torch.Tensor
    rate: torch.Tensor
    marked: torch.Tensor = field(metadata={"per_sample": False})


class Sharing(FieldShuffler):
    shared_fields = ("rate",)

    def get_workloads(self, batch):
        return batch.ids


class NotBalancing(IdentityShuffler):
    shared_fields = ("rate",)


def test_a_subclass_of_the_identity_names_shared_fields_too():
    batch = Shared(torch.arange(3), torch.tensor(0.5), torch.arange(3))
    assert NotBalancing().plan(batch).num_placed.tolist() == [3]
    with pytest.raises(ValueError, match="rate is a tensor without rows"):
        NotBalancing(shared_fields=()).plan(batch)


class Misspelt(Sharing):
    shared_fields = ("rates",)


def _shared():
    batch = Shared(torch.arange(3) + 3 * dist.get_rank(), torch.tensor(0.5), torch.arange(3))
    moved = Sharing().shuffle(batch)
    assert moved.rate is batch.rate and moved.marked is batch.marked
    return moved.ids.tolist(), error_of(Misspelt().shuffle, batch)


def test_a_shuffler_names_the_fields_that_all_samples_share(pools):
    results = pools(2).run(_shared)
    assert sorted(sample for moved, _ in results for sample in moved) == list(range(6))
    for _, error in results:
        assert error.startswith("ValueError: shared_fields names 'rates', which is not in the batch; there")


def of_any(batch):
    features = batch["features"] if isinstance(batch, dict) else batch.features
    return features.lengths()


def _errors_of_types() -> list[str]:
    """Returns the errors of types that differ between ranks, and between steps, and of an unknown type."""
    ids = KeyedJaggedTensor(["item"], torch.arange(2), lengths=torch.ones(2).int())
    # Rank 1's batch knows its padding rows, that of rank 0 does not.
    batch = {"features": ids} if dist.get_rank() == 0 else BaseBatch(ids, 2, {"item": 1})
    jagged = JaggedTensor(torch.arange(2), lengths=torch.ones(2).int())
    shuffler = Costing(lambda batch: next(iter(batch.values())).lengths())
    shuffler.plan({"x": jagged})
    return [
        error_of(Costing(of_any).plan, batch),
        error_of(shuffler.plan, [jagged]),
        error_of(Costing(squared).plan, Batch()),
    ]


def test_batches_of_other_types_are_refused_on_all_ranks(pools):
    for ranks, steps, unknown in pools(2).run(_errors_of_types):
        assert "a batch of rank 1 and that of rank 0 are of different types" in ranks
        assert steps.startswith("TypeError: a batch is a list, and the first was a dict; all must be of one")
        assert unknown.startswith(f"TypeError: {Batch.__module__}.Batch has no rows to place")
        assert "register_batch_type" in unknown


def _types_are_agreed_on() -> tuple[list[str], list[int], list[int]]:
    """Plans a batch that fails, then one of another type, of rank 0 alone; then rank 1 has one that fails."""
    jagged = JaggedTensor(torch.arange(2), lengths=torch.ones(2).int())
    shuffler = Costing(lambda batch: next(iter(batch.values())).lengths())
    failed = [error_of(shuffler.plan, [jagged])]
    first = shuffler.plan({"x": jagged} if dist.get_rank() == 0 else None)
    failed.append(error_of(shuffler.plan, {"x": jagged} if dist.get_rank() == 0 else [jagged]))
    later = shuffler.plan({"x": jagged})
    return failed, first.rows.num_loaded.tolist(), later.rows.num_loaded.tolist()


def test_the_type_of_batches_is_that_of_the_first_that_was_planned(pools):
    for failed, first, later in pools(2).run(_types_are_agreed_on):
        for error in failed:
            assert error.startswith("AttributeError: 'list' object has no attribute 'values'")
        assert (first, later) == ([2, 0], [2, 2])


class SharingScale(Costing):
    shared_fields = ("scale",)


@on_ranks(3)
def test_a_rank_without_a_batch_has_what_the_others_samples_share():
    jagged, rank = JaggedTensor(torch.arange(2), lengths=torch.ones(2).int()), dist.get_rank()
    shuffler = SharingScale(lambda batch: batch["x"].lengths())
    for step in range(3):
        has_batch = step == 0 or rank == 1
        batch = {"x": jagged, "scale": torch.tensor(0.5 + step), "step": step, "name": str(step)}
        plan = shuffler.plan(batch if has_batch else None)
        moved = shuffler.exchange(batch if has_batch else shuffler.padding_batch(), plan)
        assert (float(moved["scale"]), moved["step"], moved["name"]) == (0.5 + step, step, str(step))


@on_ranks(2)
def test_what_does_not_pickle_stays_that_of_the_first_step():
    jagged, rank = JaggedTensor(torch.arange(2), lengths=torch.ones(2).int()), dist.get_rank()
    shuffler = Costing(lambda batch: batch["x"].lengths())
    for step in range(2):
        batch = {"x": jagged, "step": step, "decode": lambda text: text} if step == 0 or rank == 0 else None
        plan = shuffler.plan(batch)
        moved = shuffler.exchange(shuffler.padding_batch() if batch is None else batch, plan)
        assert moved["step"] == (0 if batch is None else step) and plan.num_placed.tolist() == [
            2 - step,
            2 - step,
        ]


@dataclass
class Doubling:
    ids: torch.Tensor

    def __post_init__(self) -> None:
        self.ids = self.ids * 2


@dataclass
class Widening:
    ids: torch.Tensor
    weights: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.ids = self.ids.long()  # changes nothing the second time
        self.weights = self.ids.float()


@dataclass
class OfSomethingElse:
    ids: torch.Tensor
    factor: InitVar[int] = 1

    def __post_init__(self, factor: int) -> None:
        self.ids = self.ids * factor


@dataclass
class DoublingBatch(BaseBatch):
    ids: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.ids = self.ids * 2
        super().__post_init__()


@dataclass
class CopyingBatch(BaseBatch):
    ids: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.contextual_feature_names = list(self.contextual_feature_names)
        super().__post_init__()


def _made_again() -> list[Any]:
    ids = torch.arange(3, dtype=torch.int32) + 3 * dist.get_rank()
    shuffler = Costing(lambda batch: batch.ids.long())
    moved = shuffler.shuffle(Widening(ids))
    assert torch.equal(moved.weights, moved.ids.float())
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(3).int())
    copying = CopyingBatch(features, 3, {}, ids=ids)
    assert error_of(Costing(lambda batch: batch.ids.long()).shuffle, copying) == "no error"
    errors = [
        error_of(Costing(lambda batch: batch.ids.long()).shuffle, kind(ids))
        for kind in (Doubling, OfSomethingElse)
    ]
    batch = DoublingBatch(features, 3, {}, ids=ids)
    errors.append(error_of(Costing(lambda batch: batch.ids.long()).shuffle, batch))
    return [moved.ids.tolist(), *errors]


def test_dataclasses_that_change_when_made_again_are_refused(pools):
    results = pools(2).run(_made_again)
    assert sorted(sample for moved, *_ in results for sample in moved) == list(range(6))
    for _, doubling, other_arguments, base in results:
        assert base.startswith("TypeError: ids changes when dataclasses.replace rebuilds a")
        assert "ids changes when dataclasses.replace rebuilds a" in doubling
        assert "its __init__ takes something other than its fields" in other_arguments
        assert "register_batch_type" in doubling and "register_batch_type" in other_arguments


def _errors_of_keys() -> list[str]:
    errors = []
    for keys in (("ab", "ab"), ("ab", "ba")):
        batch = {"kt": KeyedTensor(list(keys[dist.get_rank()]), [1, 1], torch.zeros(2, 2))}
        shuffler = Costing(lambda batch: torch.ones(2, dtype=torch.int64))
        errors.append(error_of(shuffler.plan, batch))
    return errors


def test_ranks_agree_on_the_keys_of_keyed_tensors(pools):
    for same, other in pools(2).run(_errors_of_keys):
        assert same == "no error"
        assert "field 'kt(b: 1, a: 1)' is unexpected" in other or "field 'kt(a: 1, b: 1)' is missing" in other


def _error_of_unpicklable() -> str:
    batches = [{"ids": torch.arange(3), "call": lambda: 0}] if dist.get_rank() else []
    return error_of(list, Costing(lambda batch: batch["ids"]).plan_ahead(batches))


def test_a_batch_that_cannot_be_sent_is_an_error_on_all_ranks(pools):
    for error in pools(2).run(_error_of_unpicklable):
        assert "a batch of rank 1 does not pickle" in error


def _worked_in_place():
    shuffler = Costing(lambda batch: batch["x"].long())
    rows = []
    for batch, plan in shuffler.plan_ahead([{"x": torch.ones(1)}] * 3 if dist.get_rank() else []):
        moved = shuffler.exchange(batch, plan)
        rows.append(moved["x"].tolist())
        moved["x"].mul_(1e30)
    return rows


def test_a_model_may_work_in_place_on_a_copied_row(pools):
    assert pools(2).run(_worked_in_place) == [[[1.0]] * 3] * 2


def test_tensordicts_keep_names_and_locks_and_change_device():
    batch = TensorDict({"n": TensorDict({"ids": torch.arange(4)}, [4])}, [4], names=["row"]).lock_()
    moved = tree.transform(batch, lambda leaf: leaf[:3].to("meta"))
    assert moved.names == ["row"] and moved.is_locked and moved.batch_size == (3,)
    assert moved["n", "ids"].device.type == "meta"
    without_rows = TensorDict({"n": TensorDict({"ids": torch.arange(4)}, [])}, [])
    assert tree.move_to(without_rows, torch.device("meta"))["n", "ids"].device.type == "meta"


@pytest.mark.parametrize("of", ["lengths", "offsets"])
@on_ranks(2)
def test_planning_leaves_nothing_in_the_loaded_fields_for_a_copy_to_take_along(of):
    lengths = torch.tensor([1, 2, 0, 3])
    given = {"lengths": lengths} if of == "lengths" else {"offsets": torch.tensor([0, 1, 3, 3, 6])}
    values = torch.arange(6, dtype=torch.int32)
    batch = {
        "n": torch.arange(4),
        "keyed": KeyedJaggedTensor(["a"], values, **given),
        "jagged": JaggedTensor(values, **given),
    }

    def asked(of_batch):
        return of_batch["keyed"]["a"].offsets()[1:] + of_batch["jagged"].offsets()[1:]

    shuffler = Costing(asked)
    for _ in range(2):
        plan = shuffler.plan(batch)
    assert plan.rows.workloads.tolist() == [2, 6, 6, 12] * 2
    for value in (batch["keyed"], batch["jagged"]):
        assert (value.lengths_or_none() is None) == (of == "offsets")
        assert (value.offsets_or_none() is None) == (of == "lengths")


def test_lengths_below_zero_are_refused_by_row_and_key():
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.tensor([3, -1, 1, 1]))
    shuffler = IdentityShuffler(get_workloads=lambda batch: torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"'ids' has a length of -1 for row 1 of key 'a'; expected 0 to"):
        shuffler.plan({"ids": ids})


def _adds_a_key(batch: Any) -> torch.Tensor:
    batch["n"] = batch["inner"]["mask"].sum(1)
    batch["inner"]["n"] = batch["n"]
    return batch["n"]


@on_ranks(2)
def test_a_key_that_counting_adds_stays_out_of_the_batch():
    batch = {"inner": {"mask": torch.ones(4, 3 + dist.get_rank(), dtype=torch.int64)[:, :3]}}
    moved = Costing(_adds_a_key).shuffle(batch)
    assert [*batch, *batch["inner"]] == [*moved, *moved["inner"]] == ["inner", "mask"]


class InPlace(FieldShuffler):
    """Computes costs in place, and counts clicks."""

    def __init__(self, write, **settings: Any) -> None:
        self._write = write
        super().__init__(**settings)

    def get_workloads(self, batch):
        self._write(batch["clicked"])
        return torch.ones(3, dtype=torch.int64)

    def get_loss_tokens(self, batch):
        return batch["clicked"].lengths() + (batch["clicked"].values() == 0).sum()


WRITES = {
    "torch": lambda clicked: clicked.lengths().clamp_(max=2),
    "numpy": lambda clicked: np.square(clicked.lengths().numpy(), out=clicked.lengths().numpy()),
    "data": lambda clicked: clicked.lengths().data.zero_(),
    "values": lambda clicked: clicked.values().clamp_(max=0),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_costs_that_are_computed_in_place_change_no_other_count(write, inference):
    lengths = torch.tensor([3, 1, 5], dtype=torch.int32)
    with torch.inference_mode(inference):
        batch = {"clicked": JaggedTensor(torch.arange(1, 10, dtype=torch.int32), lengths=lengths)}
        rows = InPlace(WRITES[write]).plan(batch).rows
    assert rows.tokens.tolist() == rows.loss_tokens.tolist() == rows.key_lengths[:, 0].tolist() == [3, 1, 5]


@pytest.mark.parametrize("name", ["mask", "ids"])
@on_ranks(2)
def test_counting_may_not_write_into_the_batch(name):
    def writes(batch):
        if dist.get_rank():
            (batch["mask"] if name == "mask" else batch["ids"].values()).fill_(0)
        return torch.ones(2, dtype=torch.int64)

    batch = {"mask": torch.ones(2, 3), "ids": JaggedTensor(torch.arange(4), lengths=torch.tensor([3, 1]))}
    error = error_of(Costing(writes).plan, batch)
    whose = "ids.values()" if name == "ids" else name
    assert error.startswith(f"ValueError: {whose} of a batch changed after the loader gave it")
    assert "If get_workloads computes in place, have it work on a clone" in error


def test_a_batch_with_padding_within_another_container_is_refused():
    inner = _incomplete(torch.ones(8, 1))
    with pytest.raises(TypeError, match=r"\[0\] is a .*BaseBatch within a tuple, which would keep the"):
        FieldShuffler().plan((inner, torch.ones(8)))


@dataclass
class Extended(BaseBatch):
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


@on_ranks(2)
def test_a_batch_that_lost_rows_after_it_was_made_is_refused_in_every_step():
    shuffler = Costing(BaseBatch.num_tokens)
    for step in range(2):
        batch = Extended(_incomplete(torch.ones(8, 1)).features, 8, {}, extra={"x": torch.ones(8)})
        if step and dist.get_rank():
            batch.extra["x"] = torch.ones(4)
        error = error_of(shuffler.plan, batch)
        assert not step or error.startswith("ValueError: Extended.extra.x has 4 rows, expected"), error


@dataclass(kw_only=True)
class Pieced(BaseBatch):
    pieces: torch.Tensor


def test_a_field_that_the_exchange_sets_is_refused():
    batch = Pieced(_incomplete(torch.ones(8, 1)).features, 8, {}, pieces=torch.ones(8))
    with pytest.raises(TypeError, match="Pieced has a field 'pieces', which the exchange sets: rename it"):
        FieldShuffler().plan(batch)


@dataclass
class WithContext:
    ids: torch.Tensor
    context: BaseBatch = field(metadata={"per_sample": False})


def test_a_batch_with_padding_may_be_shared():
    batch = WithContext(torch.ones(8, dtype=torch.int64), _incomplete(torch.ones(8, 1)))
    assert Costing(lambda batch: batch.ids).plan(batch).num_placed.tolist() == [8]


@on_ranks(2)
def test_batches_may_be_views_of_one_ring_of_memory():
    ring = torch.zeros(4, 3, 2)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for step in range(12):
            yield {"mask": ring[step % 4].fill_(step), "cost": torch.arange(3)}

    shuffler = Costing(lambda batch: batch["cost"])
    assert [float(batch["mask"][0, 0]) for batch, _ in shuffler.plan_ahead(batches())] == [*range(12)]


@pytest.mark.parametrize("enabled", [True, False])
def test_planning_ahead_leaves_memory_that_torch_may_resize(enabled):
    batch = {"cost": torch.arange(3), "ids": JaggedTensor(torch.arange(3), lengths=torch.ones(3).long())}
    for _ in Costing(lambda batch: batch["cost"], enabled=enabled).plan_ahead([batch]):
        assert batch["cost"].untyped_storage().resizable()
        assert batch["ids"].values().untyped_storage().resizable()


def test_what_one_count_leaves_in_the_batch_is_there_for_the_next():
    class Leaving(FieldShuffler):
        def get_workloads(self, batch):
            batch["clicks"] = batch["number"] % 3
            return batch["clicks"]

        def get_loss_tokens(self, batch):
            return batch["clicks"]

    rows = Leaving().plan({"number": torch.arange(4)}).rows
    assert rows.loss_tokens.tolist() == rows.workloads.tolist() == [0, 1, 2, 0]
