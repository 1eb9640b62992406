"""One rank's batch runs as it was loaded: its padding rows may have elements, which are in no micro-batch."""

from __future__ import annotations

import dataclasses

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.extensions.micro_batches import MicroBatches
from commons.sequence_batch import BaseBatch
from tests.commons.histories import TokenShuffler


@dataclasses.dataclass(eq=False)
class TwoFields(BaseBatch):
    """A batch with another field of elements as large."""

    other: JaggedTensor | None = None


def test_micro_batches_of_one_rank_leave_the_elements_of_padding_out():
    lengths = torch.tensor([1, 2, 3, 2, 1, 1, 2, 3])  # of four rows, key by key; the fourth is padding
    batch = TwoFields(
        features=KeyedJaggedTensor(["a", "b"], torch.arange(100, 115), lengths=lengths),
        batch_size=4,
        feature_to_max_seqlen={},
        actual_batch_size=3,
        other=JaggedTensor(torch.arange(10), lengths=torch.tensor([2, 3, 1, 4])),
    )
    micro = MicroBatches(max_tokens=6)
    shuffler = TokenShuffler(extensions=[micro])
    plan = shuffler.plan(batch)
    parts = micro.micro_batches(shuffler.exchange(batch, plan), plan)
    assert len(parts) > 1
    rows = []
    for part in parts:
        columns = [*part.features.to_dict().values(), part.other]
        each = [column.to_dense() for column in columns]
        rows += [tuple(of[row].tolist() for of in each) for row in range(part.num_samples)]
    expected = [([100], [108], [0, 1]), ([101, 102], [109], [2, 3, 4]), ([103, 104, 105], [110, 111], [5])]
    assert sorted(rows) == expected
