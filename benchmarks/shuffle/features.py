"""The stage alone, on batches of 32 rows with few and with many features, beside a stand-in for training.

torchrun --nproc_per_node 2 -m benchmarks.shuffle.features OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.machine import spread
from benchmarks.shuffle.arms import ARMS
from benchmarks.shuffle.stage_clock import CollectiveCounter, StageClock
from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler
from commons.perf_model import HSTUFlops
from commons.pipeline.shuffle_stage import ShuffleStage
from commons.training import rank_process, run_rank

ROWS, NUM_FEATURES = 32, (5, 20, 50)
LOG_MEAN, LOG_STD, LONGEST = 5.0, 1.2, 1024
WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 3, 6, 5
TRAINING_MATMULS, MATRIX = 30, 384  # some tens of milliseconds in which the main thread is in an operator


class FlopsShuffler(BatchShuffler):
    """Balances the FLOPs of two HSTU layers of width 128."""

    def get_workloads(self, batch: HSTUBatch) -> torch.Tensor:
        """Forward FLOPs of each row, by the item feature."""
        lengths = batch.features.lengths().view(-1, batch.batch_size)[0].long()
        return HSTUFlops(2, 128, 2, 64).per_sample(2 * lengths + 1)


def hstu_batch(rng: np.random.Generator, num_features: int) -> HSTUBatch:
    """Items and actions of lognormal histories, a label per item, and contextual features of one id each."""
    history = np.clip(rng.lognormal(LOG_MEAN, LOG_STD, ROWS), 1, LONGEST).astype(np.int64)
    contextual = [f"context_{number}" for number in range(num_features - 2)]
    lengths = np.concatenate([history, history, np.ones(ROWS * len(contextual), dtype=np.int64)])

    def keyed(keys: list[str], of_keys: np.ndarray) -> KeyedJaggedTensor:
        values = torch.from_numpy(rng.integers(0, 1000, int(of_keys.sum())))
        return KeyedJaggedTensor(keys, values, lengths=torch.from_numpy(of_keys))

    return HSTUBatch(
        features=keyed(["item", "action", *contextual], lengths),
        batch_size=ROWS,
        feature_to_max_seqlen={},
        contextual_feature_names=contextual,
        labels=keyed(["label"], history),
        action_feature_name="action",
    )


class Arm:
    """A stage of its own, fed with batches of its own."""

    def __init__(self, settings: dict[str, Any], num_features: int) -> None:
        self.shuffler = FlopsShuffler(**settings)
        self.stage = ShuffleStage(self.shuffler, torch.device("cpu"), "sum")
        self.clock = StageClock(self.stage, self.shuffler)
        self._batches = self.clock.watch(self._loader(num_features))
        self._matrix = torch.randn(MATRIX, MATRIX)
        self.reports: list[Any] = []

    def run(self, steps: int) -> None:
        """Takes some batches through the stage, with something to compute behind each."""
        for _ in range(steps):
            self.stage.exchange(self.stage.next_batch(self._batches))
            self.stage._computed = self.stage._exchanged.popleft()
            self.reports.append(self.stage.report())
            for _ in range(TRAINING_MATMULS):
                torch.mm(self._matrix, self._matrix)

    def figures(self, collectives: dict[str, int]) -> dict[str, Any]:
        """Medians and spread."""
        measured = self.clock.milliseconds
        stage = [
            planning + exposed
            for planning, exposed in zip(measured["planning"], measured["exposed"], strict=False)
        ]
        exposed = [share / whole for share, whole in zip(measured["exposed"], stage, strict=False)]
        return {
            "stage_ms": spread(stage),
            "exposed_ms": spread(measured["exposed"]),
            "exposed_share_of_stage": spread(exposed),
            "planning_ms": spread(measured["planning"]),
            "exchange_ms": spread(measured["exchange"]),
            "collectives_per_step": collectives,
            "kilobytes_sent": spread([report.bytes_sent / 1e3 for report in self.reports]),
            "kilobytes_received": spread([report.bytes_received / 1e3 for report in self.reports]),
        }

    @staticmethod
    def _loader(num_features: int) -> Iterator[HSTUBatch]:
        rng = np.random.default_rng(dist.get_rank())
        while True:
            yield hstu_batch(rng, num_features)


def main() -> None:
    """Runs all arms with all numbers of features; rank 0 writes the figures."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
    with rank_process():
        results = {}
        for num_features in tqdm(NUM_FEATURES, desc="features", disable=dist.get_rank() != 0):
            arms = {name: Arm(settings, num_features) for name, settings in ARMS.items()}
            collectives = {}
            for name, arm in arms.items():
                arm.run(WARM_UP_STEPS)
                with CollectiveCounter() as counter:
                    arm.run(STEPS_PER_BLOCK)
                collectives[name] = {op: count / STEPS_PER_BLOCK for op, count in counter.counts.items()}
                arm.clock.clear()
                arm.reports.clear()
            in_turn = list(arms.values())
            for _ in range(BLOCKS):
                for arm in in_turn:
                    arm.run(STEPS_PER_BLOCK)
                in_turn.append(in_turn.pop(0))
            results[num_features] = {name: arm.figures(collectives[name]) for name, arm in arms.items()}
        if dist.get_rank() == 0:
            output.write_text(json.dumps(results))


if __name__ == "__main__":
    run_rank(main)
