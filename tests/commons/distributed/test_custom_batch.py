"""A user's own batch and shuffler, written as a user would: nothing else is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler, BatchShufflerFactory, register_batch_shuffler
from commons.sequence_batch import BaseBatch


@dataclass
class SessionBatch(BaseBatch):
    clicks: KeyedJaggedTensor | None = None
    prices: torch.Tensor | None = None


@register_batch_shuffler("session")
class SessionShuffler(BatchShuffler):
    def get_workloads(self, batch: SessionBatch) -> torch.Tensor:
        return batch.clicks.lengths() ** 2


def _shuffle_sessions() -> list[tuple[list[int], list[int], list[float]]]:
    rank = dist.get_rank()
    lengths = torch.tensor([[1, 1, 2], [8, 9, 10]][rank])
    sessions = torch.arange(3) + 3 * rank
    batch = SessionBatch(
        features=KeyedJaggedTensor(["user"], sessions, lengths=torch.ones(3, dtype=torch.int64)),
        batch_size=3,
        feature_to_max_seqlen={"user": 1},
        clicks=KeyedJaggedTensor(["click"], sessions.repeat_interleave(lengths), lengths=lengths),
        prices=torch.stack([sessions, -sessions], 1).float(),
    )
    shuffled = BatchShufflerFactory.create("session").shuffle(batch)
    clicks = shuffled.clicks["click"].to_dense()
    users = shuffled.features["user"].to_dense()
    return [
        (users[i].tolist(), clicks[i].tolist(), shuffled.prices[i].tolist())
        for i in range(shuffled.num_samples)
    ]


def test_custom_batch_and_shuffler(pools):
    ranks = pools(2).run(_shuffle_sessions)
    lengths = [1, 1, 2, 8, 9, 10]
    assert sorted(ranks[0] + ranks[1]) == [([s], [s] * n, [s, -s]) for s, n in enumerate(lengths)]
    loads = [sum(len(clicks) ** 2 for _, clicks, _ in samples) for samples in ranks]
    assert max(loads) / sum(loads) < 0.6


@dataclass
class MaskedBatch(SessionBatch):
    """Tells the loss tokens of its rows."""

    loss_tokens: torch.Tensor | None = field(default=None, metadata={"per_sample": False})

    def num_loss_tokens(self) -> torch.Tensor:
        return self.loss_tokens


@pytest.mark.parametrize(
    ("loss_tokens", "message"),
    [
        (torch.tensor([0.5, -1.0]), r"MaskedBatch.num_loss_tokens returned -1.0 for row 1"),
        (
            torch.ones(3),
            r"MaskedBatch.num_loss_tokens returned shape \(3,\), expected one number per row: \(2,\)",
        ),
    ],
)
def test_counts_that_a_batch_gives_are_checked(loss_tokens, message):
    batch = MaskedBatch(
        features=KeyedJaggedTensor(["user"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64)),
        batch_size=2,
        feature_to_max_seqlen={},
        clicks=KeyedJaggedTensor(["click"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64)),
        loss_tokens=loss_tokens,
    )
    with pytest.raises(ValueError, match=message):
        BatchShufflerFactory.create("session").plan(batch)
