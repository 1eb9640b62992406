"""Fields of a batch, or of values, that the library made out of others have memory of their own."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.extensions.controller import merge, split_balanced
from commons.extensions.micro_batches import MicroBatches, run_micro_batches
from commons.extensions.unshuffle import Unshuffle
from commons.sequence_batch import BaseBatch
from tests.commons.pipeline.click_models import Clicks, Head, sharding
from tests.commons.pipeline.ranking_pipelines import CPU, pipeline_of, steps_of
from tests.on_ranks import on_ranks
from tests.process_pool import RankError

NUM_IDS, SLACK = 100, 64  # bytes by which memory may exceed a field, as for alignment


class ItemShuffler(BatchShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch["items"].lengths() ** 2


class FeatureShuffler(BatchShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return self.get_tokens(batch) ** 2


def row_lengths(rows: int = 6, longest: int = 20) -> torch.Tensor:
    """Returns lengths that differ between ranks, those of rank 1 up to three times as long."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(4, longest * (1 + 2 * dist.get_rank()), (rows,), generator=generator)


def visits(lengths: torch.Tensor) -> dict[str, Any]:
    """Returns items and, for each, a target, which is the item's number plus one; every third is 0."""
    items = torch.arange(int(lengths.sum())) * 7 % (NUM_IDS - 1)
    targets = torch.where(items % 3 == 0, 0, items + 1)
    jagged = (JaggedTensor(values, lengths=lengths.clone()) for values in (items, targets))
    return dict(zip(("items", "targets"), jagged, strict=True))


def sessions(rows: int = 6) -> BaseBatch:
    """Returns long features with a few labels each."""
    lengths, ones = row_lengths(rows, 300), torch.ones(rows, dtype=torch.int64)
    ids = torch.arange(int(lengths.sum())) % NUM_IDS
    labels = KeyedJaggedTensor(["clicked"], torch.arange(rows) % 2, lengths=ones)
    return BaseBatch(KeyedJaggedTensor(["item"], ids, lengths=lengths), rows, {}, labels=labels)


def gathered(values: list[Any]) -> list[Any]:
    """Returns the values of all ranks, sorted."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, values)
    return sorted(value for of_rank in of_ranks for value in of_rank)


def rows_of(jagged: JaggedTensor) -> list[list[Any]]:
    return [row.tolist() for row in jagged.values().split(jagged.lengths().tolist())]


class Predictor(nn.Module):
    """Scores each item; the loss leaves out targets of 0, which it masks in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(NUM_IDS, 4), nn.Linear(4, NUM_IDS)

    def forward(self, items: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.table(items))
        targets[targets == 0] = -100
        return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


@on_ranks(2)
def test_targets_can_be_masked_in_place_after_the_lookup_of_the_items():
    moved = ItemShuffler().shuffle(visits(row_lengths()))
    items, targets = moved["items"].values(), moved["targets"].values()
    expected = Predictor()
    expected(items.clone(), targets.clone()).backward()
    for parameter in expected.parameters():
        dist.all_reduce(parameter.grad)
    model = DistributedDataParallel(Predictor())
    model(items, targets).backward()
    assert items.ge(0).all() and bool((targets == -100).any())
    for got, wanted in zip(model.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad / 2)


@on_ranks(2)
def test_labels_that_are_kept_for_metrics_keep_no_features_in_memory():
    shuffler, kept = FeatureShuffler(), []
    for batch, plan in shuffler.plan_ahead(sessions() for _ in range(3)):
        moved = shuffler.exchange(batch, plan)
        shuffler.scale(torch.zeros(()), plan, None)
        kept.append(moved.labels.values())
        del moved
    assert len(kept) == 3
    for labels in kept:
        assert labels.untyped_storage().nbytes() <= labels.nbytes + SLACK


class JaggedHead(Head):
    """Takes jagged labels; returns them as its output."""

    def forward(self, pooled: Any, labels: JaggedTensor) -> Any:
        assert labels.values().untyped_storage().nbytes(), "the memory of the labels was freed"
        loss, _ = super().forward(pooled, (labels.values() % 2).float())
        return loss, labels.values().clone()


class JaggedClicks(Clicks):
    """Tables of "a" and "b", whose order in the batch is another, so that TorchRec permutes them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = JaggedHead()

    def forward(self, batch: Any) -> Any:
        return self.head(self.tables(batch["features"]), batch["labels"])


def clicks(step: int, rows: int = 6) -> dict[str, Any]:
    lengths = torch.stack([row_lengths(rows, 6), row_lengths(rows, 6).flip(0)])
    ids = torch.arange(int(lengths.sum())) % 30
    labels = 1000 * step + 100 * dist.get_rank() + torch.arange(rows)
    return {
        "features": KeyedJaggedTensor(["b", "a"], ids, lengths=lengths.view(-1)),
        "labels": JaggedTensor(labels, lengths=torch.ones(rows, dtype=torch.int64)),
    }


def trained_clicks(early: bool, extensions: list[Any]) -> tuple[list[float], list[int]]:
    """Returns the global loss sum of each step of `native`, and the labels that all ranks trained on."""
    model = JaggedClicks()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.5})
    sharded = DistributedModelParallel(model, device=CPU, plan=sharding(model.tables, False))
    optimizer, shuffler = (
        torch.optim.SGD(model.head.parameters(), 0.5),
        FeatureShuffler(extensions=extensions),
    )
    more = {"free_features_storage_early": early}
    pipeline = pipeline_of("native", sharded, optimizer, shuffler, "mean", **more)
    losses, labels = [], []
    for loss_sum, _, output in steps_of(pipeline, [clicks(step) for step in range(3)]):
        dist.all_reduce(loss_sum)
        losses.append(round(float(loss_sum), 4))
        labels += torch.cat(output if isinstance(output, list) else [output]).tolist()
    return losses, gathered(labels)


def check_trained_clicks(losses: list[float], labels: list[int]) -> None:
    assert labels == gathered(
        [label for step in range(3) for label in clicks(step)["labels"].values().tolist()]
    )
    assert losses == trained_clicks(False, [])[0]


@on_ranks(2)
def test_features_that_torchrec_frees_early_leave_jagged_labels_in_memory():
    check_trained_clicks(*trained_clicks(True, []))


def micro_batched_clicks() -> None:
    check_trained_clicks(*trained_clicks(True, [MicroBatches(max_tokens=40)]))


def check_refused(error: RankError) -> None:
    """Checks that every rank raised an error that a user may understand."""
    for text in error.by_rank:
        assert "\nValueError: " in text or "\nTypeError: " in text, error


def test_micro_batches_train_on_features_that_torchrec_frees_early_or_are_refused(pools):
    try:
        pools(2).run(micro_batched_clicks)
    except RankError as error:
        check_refused(error)


class PoppingModel(nn.Module):
    """Takes the targets out of its batch, and clears the items, once it has read them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_IDS, 1)

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        targets, items = batch.pop("targets").values(), batch["items"].values()
        seen = items.clone()
        losses = (self.table(seen).squeeze(1) - targets).square()
        items.zero_()
        return losses.sum(), seen


class FreeShuffler(BatchShuffler):  # all samples stay where they are
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return torch.zeros_like(batch["items"].lengths())


@on_ranks(2)
def test_a_rank_without_samples_gives_each_micro_batch_a_batch_of_its_own():
    micro = MicroBatches(max_tokens=8)
    shuffler = FreeShuffler(equal_rows=False, extensions=[micro])
    lengths = torch.tensor([7, 8, 6])
    batch = visits(lengths) if dist.get_rank() == 0 else None
    plan = shuffler.plan(batch)
    assert plan.num_placed.tolist() == [3, 0]
    moved = shuffler.exchange(shuffler.padding_batch() if batch is None else batch, plan)
    first = moved["items"].values().clone()
    model = DistributedDataParallel(PoppingModel())
    _, _, outputs = run_micro_batches(model, moved, shuffler, plan, "sum")
    assert len(outputs) == 3
    if dist.get_rank() == 0:
        assert sorted(torch.cat(outputs).tolist()) == sorted(visits(lengths)["items"].values().tolist())
    else:
        assert all(output.equal(first) for output in outputs)


class CappedShuffler(BatchShuffler):
    """Caps the lengths in place, as for a model that reads the newest 30 items."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        lengths = batch["items"].lengths()
        lengths.clamp_(max=30)
        return lengths**2


def moved_by_capped_costs() -> None:
    loaded = visits(row_lengths())
    expected = gathered(rows_of(loaded["items"])), gathered(rows_of(loaded["targets"]))
    moved = CappedShuffler().shuffle(loaded)
    assert (gathered(rows_of(moved["items"])), gathered(rows_of(moved["targets"]))) == expected


def test_costs_computed_in_place_leave_the_samples_whole_or_are_refused_by_all_ranks(pools):
    try:
        pools(2).run(moved_by_capped_costs)
    except RankError as error:
        check_refused(error)


def saved_bytes(value: torch.Tensor) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@on_ranks(2)
def test_one_of_several_unshuffled_results_is_saved_without_the_others():
    unshuffle = Unshuffle()
    shuffler = ItemShuffler(extensions=[unshuffle])
    loaded = visits(row_lengths())
    plan = shuffler.plan(loaded)
    moved = shuffler.exchange(loaded, plan)
    results = {
        "states": JaggedTensor(
            moved["items"].values().repeat_interleave(500), lengths=moved["items"].lengths() * 500
        ),
        "best": JaggedTensor(moved["targets"].values(), lengths=moved["targets"].lengths()),
    }
    home = unshuffle.unshuffle(results, plan)
    best = home["best"].values()
    assert rows_of(home["best"]) == rows_of(loaded["targets"])
    assert saved_bytes(best) <= saved_bytes(best.clone()) + SLACK


@on_ranks(2)
def test_a_merged_field_that_grows_leaves_the_other_fields_as_they_are():
    batch = visits(row_lengths())
    expected = {name: rows_of(value) for name, value in batch.items()}
    merged = merge(*split_balanced(batch, 3, batch["items"].lengths() ** 2))
    assert {name: rows_of(value) for name, value in merged.items()} == expected
    count = int(batch["items"].lengths().sum())
    grown = merged["items"].values().resize_(count + 8)  # room for what a worker appends
    grown[count:] = -1
    assert rows_of(merged["targets"]) == expected["targets"]
    assert grown[:count].equal(batch["items"].values())


@on_ranks(2)
def test_selected_labels_that_go_to_another_process_leave_the_features_here():
    batch = sessions()
    selected = batch.index_select([3, 0, 3])
    selected.labels.values().share_memory_()
    assert selected.labels.values().is_shared()
    assert not selected.features.values().is_shared() and not batch.features.values().is_shared()
    selected.labels.values().fill_(9)
    assert batch.labels.values().max() == 1
    assert rows_of(selected.features["item"]) == [rows_of(batch.features["item"])[row] for row in (3, 0, 3)]


@on_ranks(2)
def test_fields_that_a_loader_cut_from_one_buffer_are_apart_after_the_exchange():
    lengths = row_lengths()
    count, rows = int(lengths.sum()), len(lengths)
    buffer = torch.arange(2 * count + rows)
    items = JaggedTensor(buffer[:count], lengths=lengths)
    loaded = {
        "items": items,
        "next": JaggedTensor(buffer[1 : count + 1], lengths=lengths),  # overlaps
        "labels": items,  # the same object
        "users": buffer[2 * count :],
        "same users": buffer[2 * count :],
        "weights": torch.tensor([0.5]).expand(rows, 3),
    }
    moved = ItemShuffler().shuffle(loaded)
    tensors = {
        name: value.values() if isinstance(value, JaggedTensor) else value for name, value in moved.items()
    }
    before = {name: value.clone() for name, value in tensors.items()}
    for changed, tensor in tensors.items():
        tensor[0] = -1
        for name, value in tensors.items():
            if name != changed:
                assert value.equal(before[name]), (changed, name)
        assert tensor[1:].equal(before[changed][1:])
        tensor.copy_(before[changed])
    moved["labels"].lengths()[0] = 0
    assert int(moved["items"].lengths()[0]) == int(moved["next"].lengths()[0]) > 0
    assert buffer.equal(torch.arange(2 * count + rows)) and items.lengths().equal(row_lengths())
