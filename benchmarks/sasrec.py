"""A SASRec in plain PyTorch: the control of the retrieval benchmark.

Source: Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018, with a softmax over all items
as its loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class SASRecConfig:
    """Settings of the model and its training, chosen on the validation items.

    Attributes:
        width, layers, heads: sizes of the Transformer.
        length: largest number of items that the model sees. Longer histories are divided into windows.
        dropout: dropout probability of embeddings, attention, and each output.
        batch_size, learning_rate, epochs: windows per step, Adam's rate, and number of epochs.
    """

    width: int = 64
    layers: int = 2
    heads: int = 1
    length: int = 100
    dropout: float = 0.4
    batch_size: int = 32
    learning_rate: float = 3e-3
    epochs: int = 36


class SASRec(nn.Module):
    """Pre-norm Transformer layers over embedded items. Scores are products with the items' embeddings."""

    def __init__(self, num_items: int, config: SASRecConfig) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        for table in (self.items, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.dropout = nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.width, config.dropout, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, config.layers, nn.LayerNorm(config.width), enable_nested_tensor=False
        )

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Returns the state of each item, `[rows, length, width]`, for items `[rows, length]`."""
        positions = self.positions(torch.arange(items.shape[1]))
        embedded = self.dropout(self.items(items) * math.sqrt(self.items.embedding_dim) + positions)
        mask = nn.Transformer.generate_square_subsequent_mask(items.shape[1])
        return self.layers(embedded, mask=mask, is_causal=True)

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all items, `[..., num_items]`, for states `[..., width]`."""
        return states @ self.items.weight.T


def train_sasrec(
    histories: Sequence[np.ndarray], num_items: int, seed: int, config: SASRecConfig
) -> np.ndarray:
    """Trains on histories, and returns the scores of all items for what follows each, `[users, num_items]`.

    Args:
        histories: item ids of each user, oldest first, at least two of each.
        num_items: number of items, including 0 for none.
        seed: seed of parameters, order, and dropout.
        config: settings.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    windows = [window for history in histories for window in _divide(history, config.length)]
    model = SASRec(num_items, config)
    optimizer = torch.optim.Adam(model.parameters(), config.learning_rate, betas=(0.9, 0.98))
    for _ in range(config.epochs):
        for rows in _batches(rng.permutation(len(windows)), config.batch_size):
            items, lengths = _pad([windows[row] for row in rows])
            is_target = torch.arange(1, items.shape[1]) < lengths[:, None]
            scores = model.scores(model(items[:, :-1])[is_target])
            optimizer.zero_grad()
            functional.cross_entropy(scores, items[:, 1:][is_target]).backward()
            optimizer.step()
    return _score(model, histories, config)


def find_metrics(scores: np.ndarray, targets: Sequence[int]) -> tuple[float, float]:
    """Returns HR@10 and NDCG@10 of scores `[users, num_items]`. Equal scores and NaN precede a target."""
    places = (~(scores < np.take_along_axis(scores, np.array(targets)[:, None], 1))).sum(1) - 1
    hits = places < 10
    return float(hits.mean()), float(np.where(hits, 1 / np.log2(places + 2), 0).mean())


@torch.no_grad()
def _score(model: SASRec, histories: Sequence[np.ndarray], config: SASRecConfig) -> np.ndarray:
    """Returns the scores of the item after each history."""
    model.eval()
    found = []
    for rows in _batches(np.arange(len(histories)), 128):
        items, lengths = _pad([histories[row][-config.length :] for row in rows])
        found.append(model.scores(model(items)[torch.arange(len(rows)), lengths - 1]))
    scores = torch.cat(found).numpy()
    scores[:, 0] = -np.inf  # padding, no item
    return scores


def _divide(history: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Yields windows of up to `length` + 1 items, in which each item but the oldest is a target once."""
    for end in range(len(history), 1, -length):
        yield history[max(end - length - 1, 0) : end]


def _batches(order: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    yield from np.split(order, range(batch_size, len(order), batch_size))


def _pad(rows: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows with zeros at their ends, `[rows, longest]`, and their lengths."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, items in enumerate(rows):
        padded[row, : len(items)] = items
    return torch.from_numpy(padded), torch.tensor([len(row) for row in rows])
