"""Evaluation counts every sample once, whatever the output is."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.commons.distributed.internals import COPIES, without_copies
from tests.commons.pipeline.runs import check_summed, summed_outputs


def test_outputs_add_up_to_those_of_all_samples(pools):
    check_summed(pools(2).run(summed_outputs, {}))


class Pair(NamedTuple):
    scores: torch.Tensor
    mean: torch.Tensor


@dataclass
class Scaled:
    """Cannot be made again."""

    scores: torch.Tensor
    scale: InitVar[float]


def test_what_has_a_row_for_each_copy_has_none_and_the_rest_stays():
    lengths = torch.full((COPIES,), 2)
    output = {
        "pair": Pair(torch.ones(COPIES, 3), torch.ones(())),
        "keyed": KeyedJaggedTensor(["a", "b"], torch.arange(4 * COPIES), lengths=lengths.repeat(2)),
        "jagged": JaggedTensor(torch.arange(2 * COPIES), lengths=lengths),
        "pooled": KeyedTensor(["a"], [2], torch.ones(COPIES, 2)),
        "nested": torch.nested.nested_tensor_from_jagged(torch.ones(2 * COPIES), lengths=lengths),
        "matrix": torch.ones(1, 2),
        "array": np.ones((COPIES, 2)),
        "plain": ([0.5] * COPIES, [[0.1, 0.2]] * COPIES, (0.5,), [1]),
        "sparse": torch.ones(COPIES, 1).to_sparse(),
        "opaque": Scaled(torch.ones(1), 2.0),
        "none": None,
    }
    without = without_copies(output)
    assert without["pair"].scores.shape == (0, 3) and without["pair"].mean is output["pair"].mean
    assert without["keyed"].stride() == 0 and without["keyed"].keys() == ["a", "b"]
    assert [len(without[name].values()) for name in ("keyed", "jagged", "pooled", "nested")] == [0] * 4
    assert without["array"].shape == (0, 2) and without["plain"] == ([], [], (0.5,), [1])
    assert all(without[name] is output[name] for name in ("matrix", "sparse", "opaque", "none"))
