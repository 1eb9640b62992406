"""Evaluation counts every sample once, whatever the output is."""

from __future__ import annotations

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.commons.distributed.internals import COPIES, without_copies
from tests.commons.pipeline.runs import check_summed, summed_outputs


def test_outputs_add_up_to_those_of_all_samples(pools):
    check_summed(pools(2).run(summed_outputs, {}))


def test_what_has_a_row_for_each_copy_has_none_and_the_rest_stays():
    lengths = torch.full((2 * COPIES,), 2)
    rows = {
        "keyed": KeyedJaggedTensor(["a", "b"], torch.arange(4 * COPIES), lengths=lengths),
        "array": np.ones((COPIES, 2)),
        "plain": [0.5] * COPIES,
    }
    others = {"matrix": torch.ones(1, 2), "sparse": torch.ones(COPIES, 1).to_sparse(), "none": None}
    without = without_copies(rows | others)
    assert without["keyed"].stride() == 0 and without["keyed"].keys() == ["a", "b"]
    assert without["array"].shape == (0, 2) and without["plain"] == []
    assert all(without[name] is value for name, value in others.items())
