"""Labels of any kind, weights and counts of a rank become loss tokens, or are refused on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.distributed import BatchShuffler
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.histories import TokenShuffler
from tests.on_ranks import on_ranks


class Counts(BatchShuffler):
    """Loss tokens and tokens are entries of a dict, if it has them."""

    def get_workloads(self, batch):
        return batch["cost"]

    def get_loss_tokens(self, batch):
        return batch.get("get_loss_tokens", batch["cost"])

    def get_tokens(self, batch):
        return batch.get("get_tokens", batch["cost"])


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
    batch = BaseBatch(features, 3, {"item": 3}, labels=_labels(kind, lengths[dist.get_rank()]))
    plan = TokenShuffler().plan(batch)
    assert plan.rows.loss_tokens.tolist() == expected
    assert plan.num_loss_tokens == sum(expected)


@pytest.mark.parametrize("method", ["get_loss_tokens", "get_tokens"])
@on_ranks(2)
def test_counts_are_exact_in_32_bits_and_refused_in_16(method):
    counts = torch.tensor([[301, 4097], [7, 2051]])
    mask = torch.arange(5000) < counts[dist.get_rank()][:, None]
    batch = {"cost": torch.tensor([3, 1]), method: mask.float().sum(1)}
    rows = Counts().plan(batch).rows
    counted = rows.loss_tokens if method == "get_loss_tokens" else rows.tokens
    assert counted.tolist() == counts.flatten().tolist()
    for dtype in (torch.bfloat16, torch.float16):
        error = error_of(Counts().plan, {**batch, method: mask.to(dtype).sum(1)})
        assert f"ValueError: Counts.{method} returned {dtype}" in error and "add up in float32" in error


@on_ranks(2)
def test_loss_tokens_are_finite_of_one_type_and_in_int64():
    rank, cost = dist.get_rank(), torch.tensor([1, 2])
    wrong: list[torch.Tensor] = [torch.tensor([0.5, value]) for value in (-0.5, torch.nan, torch.inf)]
    for tokens in wrong:
        batch = {"cost": cost, "get_loss_tokens": tokens if rank else torch.ones(2)}
        assert "Counts.get_loss_tokens returned" in error_of(Counts().plan, batch)
    batch = {"cost": cost, "get_loss_tokens": torch.ones(2).long() if rank else torch.ones(2)}
    assert "dtype" in error_of(Counts().plan, batch)
    plan = Counts().plan({"cost": cost, "get_loss_tokens": torch.full((2,), 2**62)})
    with pytest.raises(OverflowError, match="more than int64 holds"):
        _ = plan.num_loss_tokens
