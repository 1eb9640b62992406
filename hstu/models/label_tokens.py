"""Which tokens a batch's labels belong to."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets import HSTUBatch
from hstu.modules.sequence_structure import SequenceStructure


def keyed_labels(batch: HSTUBatch) -> KeyedJaggedTensor:
    """The batch's labels; a ValueError unless they are a KeyedJaggedTensor of one key."""
    if not isinstance(batch.labels, KeyedJaggedTensor) or len(batch.labels.keys()) != 1:
        raise ValueError("HSTU models take their labels as a KeyedJaggedTensor of one key")
    return batch.labels


def labelled_item_tokens(
    structure: SequenceStructure, labels: KeyedJaggedTensor, num_unlabelled: int = 0
) -> torch.Tensor:
    """`[num_label_tokens]` int64: the tokens of the items that the labels belong to.

    Args:
        structure: of the batch.
        labels: of one key; a sample's belong to its last items.
        num_unlabelled: items at the start of a sample that cannot have a label.

    Raises:
        ValueError: a sample has more labels than such items. Checked on a CPU only, because on CUDA the
            check would wait for the device.
    """
    lengths = labels.lengths()
    most = (structure.item_lengths - num_unlabelled).clamp(min=0)
    if lengths.device.type == "cpu" and bool((lengths > most).any()):
        row = int((lengths > most).nonzero()[0])
        of_them = f", of which the first {num_unlabelled} cannot have one" if num_unlabelled else ""
        num_labels, num_items = int(lengths[row]), int(structure.item_lengths[row])
        raise ValueError(f"row {row} has {num_labels} labels for {num_items} items{of_them}")
    return structure.last_item_tokens(lengths, labels.values().shape[0])
