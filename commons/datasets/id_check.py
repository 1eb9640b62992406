"""A check of ids, which embedding lookups do not make themselves."""

from __future__ import annotations

import torch

from commons.datasets.hstu_batch import HSTUBatch
from commons.datasets.sequence_dataset_spec import SequenceDatasetSpec


def check_ids(batch: HSTUBatch, spec: SequenceDatasetSpec) -> None:
    """Checks that every id of a host batch is a row of its feature's table.

    A lookup beyond a sharded table's end trains without an error, and a negative one ends the process.

    Raises:
        ValueError: an id is negative or not below its feature's vocabulary size.
    """
    features = batch.features
    vocab_sizes = spec.vocab_sizes
    ends = features.offset_per_key()
    for index, name in enumerate(features.keys()):
        values = features.values()[ends[index] : ends[index + 1]]
        if not values.numel():
            continue
        smallest, largest = torch.aminmax(values)
        if int(smallest) >= 0 and int(largest) < vocab_sizes[name]:
            continue
        position = int(torch.nonzero((values < 0) | (values >= vocab_sizes[name]))[0])
        lengths = features.lengths().view(-1, batch.batch_size)[index]
        row = int(torch.searchsorted(lengths.cumsum(0), position, right=True))
        raise ValueError(
            f"feature {name!r} has id {int(values[position])} in row {row}; "
            f"its table has {vocab_sizes[name]} rows, so ids are 0 to {vocab_sizes[name] - 1}"
        )
