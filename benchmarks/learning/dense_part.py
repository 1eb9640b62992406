"""Trains a model whose time is not its FLOPs on two ranks, with workloads and with learned costs.

torchrun --nproc_per_node 2 -m benchmarks.learning.dense_part OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
from pathlib import Path
from typing import Any

import gin
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.demo.models import parse_config
from benchmarks.learning.arms import BALANCED, Arm
from commons.training import rank_process, run_rank

# By name, what differs from the gin file. The last one trains on the same batch in every step.
ARMS: dict[str, dict[str, Any]] = {
    "flops": BALANCED | {"balance_partitioner": "refined"},
    "learned": BALANCED | {"balance_partitioner": "refined", "balance_cost": "learned"},
    "repeated": {"enable_balanced_shuffler": False},
}
# Sizes of the dense part. Each sample brings many rows, because the time of a product with few is not
# proportional to them.
ROWS_PER_SAMPLE, WIDTH, LAYERS = 32, 512, 40
# Items per user are lognormal(3.5, 1.5), so that the dense part takes most of a step.
HISTORIES = ("history/RandomDistribution.mean = 102.0", "history/RandomDistribution.std = 297.1")
WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 4, 46, 2


class WithDensePart(nn.Module):
    """A model with a tower of known cost on every sample, whose FLOPs no workload counts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # No parameter: ranks would have to reduce its gradient.
        self.register_buffer("weight", nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)), persistent=False)

    def forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Returns the model's loss and output, after the tower."""
        loss, output = self.model(batch)
        rows = batch.num_samples * ROWS_PER_SAMPLE
        dense = torch.ones(rows, WIDTH, device=loss.device, requires_grad=True)
        for _ in range(LAYERS):
            dense = dense @ self.weight
        return loss + 0.0 * dense.sum(), output


def main() -> None:
    """Runs all arms in turn; rank 0 writes what was measured."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
    make_task = parse_config("hstu")
    gin.parse_config(HISTORIES)
    with rank_process() as device:
        arms = {
            name: Arm(make_task, settings, device, WithDensePart, repeats=name == "repeated")
            for name, settings in ARMS.items()
        }
        for arm in arms.values():
            arm.run(WARM_UP_STEPS)
        in_turn = list(arms.values())
        for _ in tqdm(range(BLOCKS), unit="block", disable=dist.get_rank() != 0):
            for arm in in_turn:
                arm.run(STEPS_PER_BLOCK)
            in_turn.append(in_turn.pop(0))
        measured = {name: arm.measured(WARM_UP_STEPS) for name, arm in arms.items()}
        if dist.get_rank() == 0:
            output.write_text(json.dumps(measured))


if __name__ == "__main__":
    run_rank(main)
