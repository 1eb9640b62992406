"""Batches for HSTU models, built from arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from commons.datasets import HSTUBatch
from commons.datasets.sample_source import keyed_rows

Rows = Sequence[np.ndarray]


def make_hstu_batch(contextual: Mapping[str, Rows], items: Rows, actions: Rows, num_rows: int) -> HSTUBatch:
    """Returns a batch of `num_rows` rows. The rows after the samples are padding rows.

    Args:
        contextual: ids of each sample, by feature.
        items, actions: ids in each sample's history. The actions are also the labels.
        num_rows: number of rows, at least the number of samples.
    """
    return HSTUBatch(
        features=keyed_rows({**contextual, "item": items, "action": actions}, num_rows),
        batch_size=num_rows,
        actual_batch_size=len(items),
        feature_to_max_seqlen={},
        contextual_feature_names=list(contextual),
        labels=keyed_rows({"label": actions}, num_rows),
        item_feature_name="item",
        action_feature_name="action",
    )
