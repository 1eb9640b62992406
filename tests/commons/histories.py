"""Histories of users in batches of the tests' own, and what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import BatchShuffler
from commons.perf_model import HSTUFlops
from commons.sequence_batch import BaseBatch

VOCABULARY, NUM_CLASSES = 50, 5
FLOPS = HSTUFlops(num_layers=1, hidden_size=128, num_heads=2, head_dim=64)


@dataclass(eq=False)
class HistoryBatch(BaseBatch):
    """Ids of users, their items, an action on each, and labels of the last items.

    Tokens are the user's ids, then item and action in turn. Samples are cut between items; a sample's
    candidates, its last items, stay together.
    """

    num_candidates: torch.Tensor | None = None

    def row_counts(self) -> dict[str, torch.Tensor]:
        return {} if self.num_candidates is None else {"num_candidates": self.num_candidates}

    def cut_rules(self):
        from commons.extensions.pieces import cut_rules as of  # absent where the core is tested alone

        fields = {
            "features.user": of.WITH_FIRST,
            "features.item": of.ALONG_ITEMS,
            "features.action": of.ALONG_ITEMS,
            "labels": of.FROM_END,
            "loss_tokens": of.FROM_END,
            "num_candidates": of.WITH_LAST,
        }
        return of.CutRules(
            items=(of.ItemGroup("features.item", tokens=2),),
            fields=fields,
            head=("features.user",),
            kept_together="" if self.num_candidates is None else "num_candidates",
        )


def keyed(lengths: Mapping[str, Sequence[int] | np.ndarray], values: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        list(lengths), values, lengths=torch.from_numpy(np.concatenate(list(lengths.values())))
    )


def histories(
    items: Sequence[int] | np.ndarray,
    rng: np.random.Generator | None = None,
    *,
    num_real: int | None = None,
    num_users: int | np.ndarray = 1,
    num_candidates: np.ndarray | None = None,
) -> HistoryBatch:
    """Makes a batch of rows with so many items; ids are drawn, or count up without a generator."""
    items = np.asarray(items, dtype=np.int64)
    num_real = len(items) if num_real is None else num_real
    is_real = np.arange(len(items)) < num_real
    items = items * is_real
    lengths = {"user": num_users * is_real, "item": items, "action": items}
    labels = items if num_candidates is None else num_candidates

    def ids(count: int, end: int) -> torch.Tensor:
        return torch.from_numpy(np.arange(count) % end if rng is None else rng.integers(0, end, count))

    return HistoryBatch(
        features=keyed(lengths, ids(sum(int(of.sum()) for of in lengths.values()), VOCABULARY)),
        batch_size=len(items),
        actual_batch_size=num_real,
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        labels=keyed({"label": labels}, ids(int(labels.sum()), NUM_CLASSES)),
        num_candidates=None if num_candidates is None else torch.from_numpy(num_candidates),
    )


def draw_histories(rng: np.random.Generator, rows: int) -> HistoryBatch:
    """Draws a batch of up to 30 items; four in ten batches have padding rows."""
    num_real = int(rng.integers(0, rows + 1)) if rng.random() < 0.4 else rows
    return histories(rng.lognormal(1.5, 1.0, rows).clip(max=30), rng, num_real=num_real)


def drawn_lengths(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Returns int64 items of samples, at least 1; some samples are longer than all others together."""
    spread = rng.choice([0.5, 1.2, 2.0])
    return rng.lognormal(5, spread, num_samples).clip(1, 20_000).astype(np.int64)


def contents(batch: HistoryBatch) -> list[tuple]:
    """Returns for each sample its user, items, actions and labels."""
    columns = [column.to_dense() for column in (*batch.features.to_dict().values(), batch.labels["label"])]
    return [tuple(tuple(column[row].tolist()) for column in columns) for row in range(batch.num_samples)]


def num_tokens(sample: tuple) -> int:
    """Tokens of a sample as `contents` returns it."""
    return sum(map(len, sample[:3]))


class TokenShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens() ** 2

    def prefix_cost(self, tokens, counts):
        return tokens**2

    @staticmethod
    def cut_rules(batch):
        return batch.cut_rules()


class FlopsShuffler(TokenShuffler):
    """The workloads are the FLOPs of a layer: of matrix products, and of attention."""

    def get_workloads(self, batch):
        return FLOPS.work(batch.num_tokens(), torch.from_numpy(batch.row_counts_on_host()["features.user"]))

    def prefix_cost(self, tokens, counts):
        return FLOPS.prefix_work(tokens, counts["tokens"], counts["head_tokens"], counts["kept_tokens"])
