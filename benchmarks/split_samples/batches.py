"""Batches of histories with given lengths, for the demo's HSTU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commons.datasets import HSTUBatch
from commons.datasets.sample_source import keyed_rows


def history_batch(lengths: Sequence[int], seed: int) -> HSTUBatch:
    """Returns a batch of samples with these numbers of items; of one padding row if there are none."""
    rng = np.random.default_rng(seed)
    num_rows = max(len(lengths), 1)

    def ids(high: int, counts: Sequence[int]) -> list[np.ndarray]:
        return [rng.integers(0, high, count) for count in counts]

    actions = ids(5, lengths)
    features = {"user": ids(10_000, [1] * len(lengths)), "item": ids(10_000, lengths), "action": actions}
    return HSTUBatch(
        features=keyed_rows(features, num_rows),
        batch_size=num_rows,
        actual_batch_size=len(lengths),
        feature_to_max_seqlen={"user": 1, "item": max(lengths, default=1), "action": max(lengths, default=1)},
        contextual_feature_names=["user"],
        labels=keyed_rows({"label": actions}, num_rows),
        item_feature_name="item",
        action_feature_name="action",
    )
