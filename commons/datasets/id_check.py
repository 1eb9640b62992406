"""A check of ids, which embedding lookups do not make themselves."""

from __future__ import annotations

import torch

from commons.datasets.hstu_batch import HSTUBatch
from commons.datasets.sequence_dataset_spec import SequenceDatasetSpec
from commons.unbounded_ids import NO_ID


def check_ids(batch: HSTUBatch, spec: SequenceDatasetSpec) -> None:
    """Checks that every id of a host batch is a row of its feature's table, or can get one in a dynamic one.

    A lookup beyond a sharded table's end trains without an error, and a negative one ends the process.

    Raises:
        ValueError: an id is negative or not below its feature's vocabulary size; or, in a dynamic table, the
            smallest int64.
    """
    features = batch.features
    vocab_sizes, unbounded = spec.vocab_sizes, spec.unbounded_features
    ends = features.offset_per_key()
    for index, name in enumerate(features.keys()):
        values = features.values()[ends[index] : ends[index + 1]]
        if not values.numel():
            continue
        smallest, largest = torch.aminmax(values)
        if name in unbounded:
            if int(smallest) == NO_ID:
                row = _row_of(batch, index, int(values.argmin()))
                raise ValueError(
                    f"feature {name!r} has id {NO_ID} in row {row}; ids of a dynamic table are any int64 "
                    "but the smallest, which stands for no id"
                )
            continue
        if int(smallest) >= 0 and int(largest) < vocab_sizes[name]:
            continue
        position = int(torch.nonzero((values < 0) | (values >= vocab_sizes[name]))[0])
        raise ValueError(
            f"feature {name!r} has id {int(values[position])} in row {_row_of(batch, index, position)}; "
            f"its table has {vocab_sizes[name]} rows, so ids are 0 to {vocab_sizes[name] - 1}"
        )


def _row_of(batch: HSTUBatch, feature: int, position: int) -> int:
    """The row that has a feature's value at a position among all its values."""
    lengths = batch.features.lengths().view(-1, batch.batch_size)[feature]
    return int(torch.searchsorted(lengths.cumsum(0), position, right=True))
