"""Finds the tokens that a batch's labels belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets import HSTUBatch
from hstu.modules.sequence_structure import SequenceStructure


def keyed_labels(batch: HSTUBatch) -> KeyedJaggedTensor:
    """Returns the batch's labels.

    Raises:
        ValueError: the labels are not a KeyedJaggedTensor with one key.
    """
    if not isinstance(batch.labels, KeyedJaggedTensor) or len(batch.labels.keys()) != 1:
        raise ValueError("HSTU models take their labels as a KeyedJaggedTensor with one key")
    return batch.labels


def labeled_item_tokens(
    structure: SequenceStructure,
    labels: KeyedJaggedTensor,
    num_labels: Sequence[int],
    num_unlabeled: int = 0,
) -> torch.Tensor:
    """Returns the token indices of the items that the labels belong to, `[num_label_tokens]` int64.

    Does not synchronize host and device.

    Args:
        structure: layout of the batch.
        labels: labels with one key. The labels of a sample belong to its last items.
        num_labels: number of labels of each sample, on the host.
        num_unlabeled: number of items at the start of a sample that cannot have a label.

    Raises:
        ValueError: a sample has more labels than items that can have one.
    """
    for row, (num, num_items) in enumerate(zip(num_labels, structure.host_looked_up_lengths, strict=True)):
        if num > max(num_items - num_unlabeled, 0):
            unlabeled = f", of which the first {num_unlabeled} cannot have one" if num_unlabeled else ""
            raise ValueError(f"row {row} has {num} labels for {num_items} items{unlabeled}")
    return structure.last_item_tokens(labels.lengths(), labels.values().shape[0])
