"""Evaluation counts every sample once, whatever the batch is."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.sequence_batch.batch_view import without_copied_row
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.pipeline.ranking_pipelines import pipeline_of, steps_of

SAMPLES, BATCH_SIZE = 257, 32


class EqualCosts(FieldShuffler):
    def get_workloads(self, batch):
        return torch.ones(len(batch["number"]), dtype=torch.int64)

    get_tokens = get_workloads


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        squares = self.weight * batch["number"] ** 2
        return squares, {"squares": squares.detach(), "batch": batch["number"].sum()}


def _summed(settings: dict[str, Any]) -> tuple[int, float]:
    """Returns how many outputs all ranks have, and their sum: a user who knows of no copied rows."""
    numbers = torch.arange(1, SAMPLES + 1, dtype=torch.float64).tensor_split(dist.get_world_size())
    batches = [{"number": of_step} for of_step in numbers[dist.get_rank()].split(BATCH_SIZE)]
    model = Squares()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pipeline = pipeline_of("none", model, optimizer, EqualCosts(**settings), "sum")
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for _, _, output in steps_of(pipeline, batches):
            for of_part in output if isinstance(output, list) else [output]:
                assert of_part["batch"].dim() == 0
                totals += torch.tensor([len(of_part["squares"]), of_part["squares"].sum()])
    dist.all_reduce(totals)
    return int(totals[0]), float(totals[1])


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 1}])
def test_outputs_add_up_to_those_of_all_samples(pools, settings):
    expected = SAMPLES, float(sum(number**2 for number in range(1, SAMPLES + 1)))
    assert pools(2).run(_summed, settings) == [expected] * 2


class Pair(NamedTuple):
    scores: torch.Tensor
    mean: torch.Tensor


@dataclass
class Scaled:
    scores: torch.Tensor
    scale: InitVar[float]


def test_an_output_that_cannot_be_made_again_stays():
    output = Scaled(torch.ones(1), 2.0)
    assert without_copied_row(output) is output


def test_what_has_one_row_has_none_and_the_rest_stays():
    lengths = torch.tensor([2])
    output = {
        "pair": Pair(torch.ones(1, 3), torch.ones(())),
        "keyed": KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2])),
        "jagged": JaggedTensor(torch.arange(2), lengths=lengths),
        "pooled": KeyedTensor(["a"], [2], torch.ones(1, 2)),
        "nested": torch.nested.nested_tensor_from_jagged(torch.ones(2), torch.tensor([0, 2])),
        "matrix": torch.ones(2, 2),
        "sparse": torch.ones(1, 1).to_sparse(),
        "step": 1,
    }
    without = without_copied_row(output)
    assert without["pair"].scores.shape == (0, 3) and without["pair"].mean is output["pair"].mean
    assert without["keyed"].stride() == 0 and without["keyed"].keys() == ["a", "b"]
    assert [len(without[name].values()) for name in ("keyed", "jagged", "pooled", "nested")] == [0] * 4
    assert without["matrix"] is output["matrix"] and without["step"] == 1
    assert without["sparse"] is output["sparse"]
    assert without_copied_row(None) is None
