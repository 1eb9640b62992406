"""Tensors of one element may have any stride, as in `x[:, 0]` of a batch of one row."""

import pytest
import torch

from tests.commons.distributed.internals import LoadedBatch
from tests.commons.sequence_batch.internals import Rows

ODD = {
    "a column": torch.arange(12.0).view(1, 12)[:, 5],
    "every third column": torch.arange(12.0).view(1, 12)[:, 2:9:3][:, 1],
    "a row that was turned": torch.arange(5.0)[None].T,
    "planes": torch.arange(24).view(1, 2, 12)[:, :, 3],
    "bytes": torch.arange(6, dtype=torch.uint8).view(1, 6)[:, 5],
    "conjugated": torch.arange(8.0).view(4, 2).view(torch.complex64).conj()[1:2],
}


@pytest.mark.parametrize("name", ODD)
def test_rows_of_any_stride_are_copied_sent_and_watched(name):
    tensor = ODD[name]
    rows = Rows({"x": tensor})
    copied = rows.select([rows.packed()], torch.arange(len(tensor)).numpy(), len(tensor))["x"]
    assert copied.equal(tensor)
    loaded = LoadedBatch(rows)
    loaded.check_unchanged()
    tensor.view(-1)[0] += 1
    with pytest.raises(ValueError, match="x of a batch changed after the loader gave it"):
        loaded.check_unchanged()
