"""The model of the benchmark: a small SASRec, which pads a rank's rows to the longest of them, or does not.

It predicts a label of each item from the items up to it. All its shapes follow the lengths of rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from commons.datasets.sample_source import keyed_rows
from commons.distributed import BatchShuffler
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs

WIDTH, HEADS, BLOCKS = 128, 2, 2
NUM_ITEMS, LONGEST = 20_000, 256
OPTIMIZER = OptimizerArgs("adagrad", 1e-3)


def count_flops(lengths: np.ndarray) -> np.ndarray:
    """Returns the forward FLOPs of each row by itself, int64 `[rows]`.

    A token costs six products with `WIDTH` × `WIDTH` matrices per block. Attention counts the visible half.
    """
    return BLOCKS * (12 * lengths * WIDTH**2 + 2 * lengths * (lengths + 1) * WIDTH)


def make_batch(lengths: np.ndarray, numbers: np.ndarray) -> BaseBatch:
    """Returns the samples with these numbers. Sample i has `lengths[i]` random items, drawn from seed i."""
    items, labels = [], []
    for number in numbers.tolist():
        rng = np.random.default_rng(number)
        items.append(rng.integers(0, NUM_ITEMS, lengths[number]))
        labels.append(rng.integers(0, 2, lengths[number]))
    features, targets = keyed_rows({"item": items}, len(items)), keyed_rows({"label": labels}, len(items))
    return BaseBatch(features, len(items), {"item": LONGEST}, labels=targets)


class FlopsShuffler(BatchShuffler):
    """Balances the FLOPs of rows."""

    unit = "FLOPs"

    def get_workloads(self, batch: BaseBatch) -> torch.Tensor:
        """Returns `count_flops` of each row."""
        return torch.from_numpy(count_flops(batch.features.lengths().numpy()))


class PaddedModel(nn.Module):
    """Embeds items, encodes histories, and returns the sum of the losses of their items.

    Args:
        pads: whether the rows of a batch are padded to the longest of them. If not, only attention goes row
            by row, and everything else runs on all items of the batch at once.
    """

    def __init__(self, pads: bool = True) -> None:
        super().__init__()
        table = EmbeddingConfig(NUM_ITEMS, WIDTH, "item", feature_names=["item"])
        self.embeddings = EmbeddingCollection([table], device=torch.device("meta"))
        self.encoder = _Encoder(pads)

    def forward(self, batch: BaseBatch) -> tuple[torch.Tensor, None]:
        """Returns the loss sum, and no output."""
        return self.encoder(self.embeddings(batch.features)["item"], batch.labels), None


class _Encoder(nn.Module):
    def __init__(self, pads: bool) -> None:
        super().__init__()
        self.pads = pads
        self.positions, self.head = nn.Embedding(LONGEST, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))

    def forward(self, embedded: JaggedTensor, labels: KeyedJaggedTensor) -> torch.Tensor:
        lengths = embedded.lengths()
        if self.pads:
            hidden = embedded.to_padded_dense()  # [rows, longest, width]
            positions = torch.arange(hidden.shape[1])
            is_real = positions < lengths[:, None]
        else:
            hidden = embedded.values()
            positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        hidden = hidden + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, lengths)
        if self.pads:
            hidden = hidden[is_real]
        logits = self.head(hidden).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, labels.values().float(), reduction="sum")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Encodes `[rows, longest, width]`, or `[items, width]` without padding."""
        qkv = self.qkv(self.norms[0](hidden))
        if hidden.dim() == 3:
            attended = _attend(qkv)
        else:
            attended = torch.cat([_attend(row[None])[0] for row in qkv.split(lengths.tolist())])
        hidden = hidden + self.out(attended)
        return hidden + self.mlp(self.norms[1](hidden))


def _attend(qkv: torch.Tensor) -> torch.Tensor:
    """Returns causal attention, `[rows, longest, width]`, so padding at the end of a row changes no item."""
    q, k, v = qkv.unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
