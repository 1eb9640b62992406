"""Batches for the demo's HSTU model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commons.datasets import HSTUBatch
from commons.datasets.sample_source import keyed_rows


def make_history_batch(lengths: Sequence[int], seed: int) -> HSTUBatch:
    """Returns a batch with samples of these lengths, or one padding row if there are none."""
    rng, num_rows = np.random.default_rng(seed), max(len(lengths), 1)

    def draw(high: int, counts: Sequence[int]) -> list[np.ndarray]:
        return [rng.integers(0, high, count) for count in counts]

    actions, users, items = draw(5, lengths), draw(10_000, [1] * len(lengths)), draw(10_000, lengths)
    return HSTUBatch(
        features=keyed_rows({"user": users, "item": items, "action": actions}, num_rows),
        batch_size=num_rows,
        actual_batch_size=len(items),
        feature_to_max_seqlen={},
        contextual_feature_names=["user"],
        labels=keyed_rows({"label": actions}, num_rows),
        item_feature_name="item",
        action_feature_name="action",
    )
