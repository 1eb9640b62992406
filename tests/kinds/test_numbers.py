"""Costs, counts, labels, losses and weights are right or refused, whatever their type, size and value."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.distributed import BatchShuffler
from commons.extensions.controller import merge, split_balanced
from commons.extensions.micro_batches import MicroBatches, run_micro_batches
from commons.perf_model import HSTUFlops, TransformerConfig, transformer_flops
from commons.sequence_batch import BaseBatch
from tests.commons.histories import TokenShuffler
from tests.on_ranks import on_ranks

REFUSED = (TypeError, ValueError)


class CostShuffler(BatchShuffler):
    """The workload is an entry of a dict, and each row is a token."""

    def get_workloads(self, batch):
        return batch["cost"]

    def get_tokens(self, batch):
        return torch.ones_like(batch["cost"])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_given_groups_stay_together_whatever_the_sign_of_their_number(kind):
    groups = [-7, 12, -3, -7, 12, -3, -7, 12, -3, -7, 12, -3]
    workloads = [9, 1, 4, 1, 8, 2, 6, 3, 1, 5, 2, 7]
    _, order = split_balanced({"ids": torch.arange(12)}, 3, workloads, kind(groups))
    chunks_of = {group: set() for group in groups}
    for chunk, samples in enumerate(order.partition):
        for sample in samples:
            chunks_of[groups[sample]].add(chunk)
    assert [len(chunks) for chunks in chunks_of.values()] == [1, 1, 1]


def test_merged_integers_are_exact_where_a_chunk_without_samples_returned_floats():
    ids = np.array([2**60 + 1, 2**60 + 3, 2**60 + 5])
    chunks, order = split_balanced({"row": torch.arange(3)}, 4, [3, 2, 1])
    results = [{"id": np.array([ids[row] for row in chunk["row"].tolist()])} for chunk in chunks]
    try:
        merged = merge(results, order)["id"]
    except REFUSED:
        return
    assert merged.tolist() == ids.tolist()


def _labels(kind: str, lengths: list[int]) -> JaggedTensor | KeyedTensor | torch.Tensor:
    if kind == "nested":
        return torch.nested.nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)
    if kind == "jagged":
        return JaggedTensor(torch.ones(sum(lengths)), lengths=torch.tensor(lengths))
    return KeyedTensor(["click", "like"], [2, 1], torch.ones(len(lengths), 3))


@pytest.mark.parametrize("kind", ["nested", "jagged", "keyed"])
@on_ranks(2)
def test_each_label_of_a_row_is_a_loss_token(kind):
    lengths = [[1, 5, 3], [2, 0, 7]]
    expected = [3] * 6 if kind == "keyed" else [*lengths[0], *lengths[1]]
    features = KeyedJaggedTensor(["item"], torch.arange(6), lengths=torch.tensor([1, 2, 3]))
    try:
        batch = BaseBatch(features, 3, {"item": 3}, labels=_labels(kind, lengths[dist.get_rank()]))
        plan = TokenShuffler().plan(batch)
    except REFUSED as error:
        assert "labels" in str(error)
        return
    assert plan.rows.loss_tokens.tolist() == expected
    assert plan.num_loss_tokens == sum(expected)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("kind", [torch.from_numpy, np.array])
def test_the_work_of_all_first_tokens_is_that_of_the_sample_in_any_integers(kind, dtype):
    model = HSTUFlops(num_layers=8, hidden_size=1024, num_heads=4, head_dim=256)
    lengths = np.array([0, 1, 100, 4096, 8191])
    tokens, expected = kind(lengths.astype(dtype)), model.work(lengths).tolist()
    assert model.work(tokens).tolist() == expected
    try:
        first = model.prefix_work(tokens, tokens)
    except REFUSED:
        return
    assert first.tolist() == expected


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 8)[None])
            self.layer.bias.fill_(0.1)

    def forward(self, batch):
        scores = self.layer(batch["x"]).squeeze(1)
        return (scores - batch["y"]).square().sum(), scores


def _rows(rank: int, step: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 * rank + step)
    return {
        "x": torch.randn(6, 8, generator=drawn),
        "y": torch.randn(6, generator=drawn),
        "cost": torch.randint(1, 50, (6,), generator=drawn),
    }


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("reduces_each", [True, False])
@on_ranks(2)
def test_a_gradient_scaler_changes_no_accumulated_gradient_of_micro_batches(scale, reduces_each):
    shuffler = CostShuffler(extensions=[MicroBatches(max_tokens=2)])
    model = DistributedDataParallel(Regression())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    steps = list(shuffler.plan_ahead(_rows(dist.get_rank(), step) for step in range(3)))
    plans = [plan for _, plan in steps]
    for batch, plan in steps:
        batch = shuffler.exchange(batch, plan)
        factor = shuffler.scale(torch.ones(()), plan, "sum", step_plans=plans)
        is_reduced = reduces_each or plan is plans[-1]
        with contextlib.nullcontext() if is_reduced else model.no_sync():
            loss, _, _ = run_micro_batches(model, batch, shuffler, plan, "sum", factor)
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    alone = Regression()
    losses = [alone(_rows(rank, step))[0] for rank in range(2) for step in range(3)]
    (torch.stack(losses).sum() / 36).backward()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert float((got.grad - expected.grad).norm()) <= 1e-5 * float(expected.grad.norm())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@on_ranks(2)
def test_advice_for_fractions_of_loss_tokens_gives_the_gradient_of_the_weighted_mean(reduction):
    factor = 1.0

    class Weighted(CostShuffler):
        def get_loss_tokens(self, batch):
            return batch["weight"] if factor == 1.0 else (factor * batch["weight"]).round()

    weights = torch.tensor([[0.5, 0.25, 0.75], [0.125, 1.0, 0.5]])
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    rank = dist.get_rank()
    batch = {"cost": torch.tensor([5, 1, 3]), "weight": weights[rank], "value": values[rank]}
    shuffler = Weighted()
    try:
        plan = shuffler.plan(batch)
    except ValueError as error:
        message = str(error)
        assert "get_loss_tokens" in message
        if "scale" not in message or (reduction == "sum" and '"mean"' in message):
            return
        factor = 1000.0
        plan = shuffler.plan(batch)
    batch = shuffler.exchange(batch, plan)
    parameter = torch.ones((), requires_grad=True)
    loss = (parameter * batch["value"] * batch["weight"]).sum()
    if reduction == "mean":
        loss = loss / batch["weight"].sum()
    shuffler.scale(loss, plan, reduction).backward()
    dist.all_reduce(parameter.grad)
    expected = (weights * values).sum() / weights.sum()
    assert float(parameter.grad / 2) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("method", ["get_loss_tokens", "get_tokens"])
@on_ranks(2)
def test_counts_in_16_bits_are_exact_or_refused(method):
    counts = torch.tensor([[301, 4097], [7, 2051]])
    mask = torch.arange(5000) < counts[dist.get_rank()][:, None]
    batch = {"cost": torch.tensor([3, 1]), "mask": mask}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):

        def count(batch, dtype=dtype):
            return batch["mask"].to(dtype).sum(1)

        shuffler = type("Masked", (CostShuffler,), {method: lambda self, batch, count=count: count(batch)})()
        try:
            rows = shuffler.plan(batch).rows
        except ValueError as error:
            assert method in str(error)
            continue
        counted = rows.loss_tokens if method == "get_loss_tokens" else rows.tokens
        assert counted.tolist() == counts.flatten().tolist()


@on_ranks(2)
def test_a_longer_context_never_costs_less():
    scout = TransformerConfig(
        num_layers=48,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=8192,
        gated_mlp=True,
        num_experts=16,
        experts_per_token=1,
        num_shared_experts=1,
        vocab_size=202048,
    )

    class Contexts(BatchShuffler):
        def get_workloads(self, batch):
            return transformer_flops(scout, batch["tokens"])

    tokens = [[1_000_000, 9_000_000], [4_000_000, 2_000_000]][dist.get_rank()]
    try:
        plan = Contexts().plan({"tokens": torch.tensor(tokens)})
    except (ValueError, OverflowError):
        return
    shortest, longest, long, short = plan.rows.workloads.tolist()
    assert 0 < shortest < short < long <= longest, plan.rows.workloads


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "workloads",
    [
        np.ma.array([1.0, 2.0, 1e20, 3.0], mask=[0, 0, 1, 0]),
        torch.tensor([1 + 3j, 2 + 0j, 0 + 9j, 3 + 0j]),
        np.array([1 + 3j, 2 + 0j, 0 + 9j, 3 + 0j]),
    ],
    ids=["masked array", "complex tensor", "complex array"],
)
def test_costs_of_which_a_part_would_be_dropped_are_refused(workloads):
    with pytest.raises(REFUSED, match="workloads"):
        split_balanced({"ids": torch.arange(4)}, 2, workloads)


@pytest.mark.parametrize("nested", [False, True])
@on_ranks(2)
def test_labels_in_a_list_follow_their_samples_or_are_refused(nested):
    ids = torch.arange(4) + 4 * dist.get_rank()
    labels = (ids * 0.5).tolist()
    costs = torch.tensor([[100, 90, 80, 70], [1, 2, 3, 4]][dist.get_rank()])
    batch = {"cost": costs, "id": ids, "target": {"label": labels} if nested else labels}
    shuffler = CostShuffler()
    try:
        plan = shuffler.plan(batch)
    except REFUSED as error:
        assert "target" in str(error)
        return
    assert plan.moves
    batch = shuffler.exchange(batch, plan)
    got = batch["target"]["label"] if nested else batch["target"]
    assert list(got) == (batch["id"] * 0.5).tolist()


@on_ranks(2)
def test_loss_tokens_that_overflow_are_an_error_on_all_ranks():
    class Huge(CostShuffler):
        def get_loss_tokens(self, batch):
            return torch.full((6,), 2**62)

    plan = Huge().plan(_rows(dist.get_rank(), 0))
    with pytest.raises(OverflowError, match="more than int64 holds"):
        _ = plan.num_loss_tokens
