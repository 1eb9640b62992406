"""Cost and traffic of the shuffle stage: alone, in training, and planned for up to 1,024 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.demo.training import Arm, parse_config
from benchmarks.harness import (
    Record,
    cases,
    in_turn,
    machine,
    measured,
    milliseconds,
    on_ranks,
    spread,
    timed,
)
from benchmarks.markdown import Cell, table
from benchmarks.partition.lengths import LOGNORMAL, ML_100K, Lengths, all_lengths
from benchmarks.partition.placements import BYTES_PER_TOKEN, ROWS_PER_RANK, workloads_of
from benchmarks.stage_clock import CollectiveCounter, StageClock
from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler, ShufflerSettings
from commons.distributed.exchange import EXCHANGES
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.placement import place, warm_up
from commons.gin_values import from_gin
from commons.perf_model import HSTUFlops
from commons.pipeline.shuffle_stage import ShuffleStage
from commons.training import TrainerArgs

# By name, the settings of a shuffler; the first moves everything everywhere.
ARMS: dict[str, Record] = {
    "all_gather, Karmarkar–Karp": {"exchange": "all_gather", "partitioner": "karmarkar_karp"},
    "all_to_all, Karmarkar–Karp": {"exchange": "all_to_all", "partitioner": "karmarkar_karp"},
    "all_to_all, rebalance": {"exchange": "all_to_all", "partitioner": "rebalance"},
    "all_to_all, refined": {"exchange": "all_to_all", "partitioner": "refined"},
}
RANKS_OF_TRAINING, WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 2, 3, 10, 4
# The stage alone.
RANKS_OF_FEATURES, ROWS, NUM_FEATURES = (2, 4), 32, (5, 20, 50)
LOG_MEAN, LOG_STD, LONGEST = 5.0, 1.2, 1024
BLOCKS_ALONE, STEPS_ALONE = 6, 5
TRAINING_MATMULS, MATRIX = 30, 384  # some tens of milliseconds in which the main thread is in an operator
# Planned, without processes.
PLANNED_RANKS, HIDDEN_SIZE, DRAWS = (2, 4, 8, 64, 256, 1024), 128, 10
PARTITIONERS = ("karmarkar_karp", "rebalance", "refined")
SHORT_STEP_MS = 50  # as on a GPU


def measure(movielens: Path | None = None) -> Record:
    """Returns the figures of training, of the stage alone, and of planning."""
    warm_up(ShufflerSettings())
    lengths = {name: of for name, of in all_lengths(movielens).items() if name in (ML_100K, LOGNORMAL)}
    return {
        "training": on_ranks(RANKS_OF_TRAINING, train),
        "features": {ranks: on_ranks(ranks, run_alone) for ranks in RANKS_OF_FEATURES},
        "planning": measured(
            cases(lengths=lengths, ranks=PLANNED_RANKS), partial(_planned, lengths), "planning"
        ),
        "machine": machine(),
    }


class _TrainingArm(Arm):
    """A model of its own, trained with the settings of one arm; each step is timed by itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock = StageClock(self.pipeline._stage)
        self._batches = self._clock.watch(self._batches)
        self._step_ms: list[float] = []
        self._reports: list[Any] = []

    def run(self, steps: int, timed: bool = True) -> None:
        """Trains some steps, which count if they are timed."""
        for _ in range(steps):
            self._step_ms.append(milliseconds(partial(self.pipeline.progress, self._batches)))
            self._reports.append(self.pipeline.report)
        if not timed:
            for so_far in (self._clock, self._step_ms, self._reports):
                so_far.clear()

    def figures(self) -> Record:
        """Returns medians and spread; a share is of the same step's time."""
        times = self._clock.milliseconds
        after = [report.loads_after for report in self._reports]
        return {
            "step_ms": spread(self._step_ms),
            "planning_ms": spread(times["planning"]),
            "wait_ms": spread(times["wait"], 4),
            "exchange_ms": spread(times["exchange"]),
            "exposed_share_of_step": spread(np.divide(times["exposed"], self._step_ms).tolist(), 5),
            "kilobytes_sent": spread([report.bytes_sent / 1e3 for report in self._reports]),
            "imbalance": round(sum(of.max() for of in after) / sum(of.mean() for of in after), 4),
        }


def train(device: torch.device) -> Record:
    """Trains the demo's model on a rank, all arms alternating."""
    make_task = parse_config("hstu")
    arms = {}
    for name, settings in ARMS.items():
        balanced = {f"balance_{key}": value for key, value in settings.items()}
        arms[name] = _TrainingArm(make_task, {"enable_balanced_shuffler": True, **balanced}, device)
    for arm in arms.values():
        arm.run(WARM_UP_STEPS, timed=False)
    for arm in in_turn(arms.values(), BLOCKS, "train"):
        arm.run(STEPS_PER_BLOCK)
    return {
        "ranks": dist.get_world_size(),
        "rows_per_rank": from_gin(TrainerArgs).train_batch_size,
        "steps": BLOCKS * STEPS_PER_BLOCK,
        "arms": {name: arm.figures() for name, arm in arms.items()},
    }


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


class _StageArm:
    """A stage of its own, fed with batches of its own, beside a stand-in for training."""

    def __init__(self, settings: Record, num_features: int) -> None:
        self._stage = ShuffleStage(FlopsShuffler(**settings), torch.device("cpu"), "sum")
        self._clock = StageClock(self._stage)
        self._batches = self._clock.watch(_loader(num_features))
        self._matrix = torch.randn(MATRIX, MATRIX)
        self._reports: list[Any] = []
        self.run(WARM_UP_STEPS)
        with CollectiveCounter() as counter:
            self.run(STEPS_ALONE)
        self._collectives = {name: count / STEPS_ALONE for name, count in counter.counts.items()}
        self._clock.clear()
        self._reports.clear()

    def run(self, steps: int) -> None:
        """Takes some batches through the stage, with something to compute behind each."""
        for _ in range(steps):
            self._stage.exchange(self._stage.next_batch(self._batches))
            self._stage._computed = self._stage._exchanged.popleft()
            self._reports.append(self._stage.report())
            for _ in range(TRAINING_MATMULS):
                torch.mm(self._matrix, self._matrix)

    def figures(self) -> Record:
        """Returns medians and spread."""
        times = self._clock.milliseconds
        # One batch is planned ahead.
        of_steps = list(zip(times["planning"], times["exposed"], strict=False))
        exposed, stage = np.array(of_steps)[:, 1], np.sum(of_steps, axis=1)
        return {
            "stage_ms": spread(stage.tolist()),
            "exposed_ms": spread(times["exposed"]),
            "exposed_share_of_stage": spread((exposed / stage).tolist()),
            "collectives_per_step": self._collectives,
            "kilobytes_sent": spread([report.bytes_sent / 1e3 for report in self._reports]),
            "kilobytes_received": spread([report.bytes_received / 1e3 for report in self._reports]),
        }


def _loader(num_features: int) -> Iterator[HSTUBatch]:
    rng = np.random.default_rng(dist.get_rank())
    while True:
        yield hstu_batch(rng, num_features)


def run_alone(device: torch.device) -> Record:
    """Runs the stage on a rank, on batches with few and with many features: figures by features and arm."""
    results = {}
    for num_features in NUM_FEATURES:
        arms = {name: _StageArm(settings, num_features) for name, settings in ARMS.items()}
        for arm in in_turn(arms.values(), BLOCKS_ALONE, f"{num_features} features"):
            arm.run(STEPS_ALONE)
        results[num_features] = {name: arm.figures() for name, arm in arms.items()}
    return results


def _planned(known: dict[str, Lengths], lengths: str, ranks: int) -> Record:
    """Times real plans, and counts the bytes of their exchange."""
    rng = np.random.default_rng([0, ranks])
    times: dict[str, list[float]] = {partitioner: [] for partitioner in PARTITIONERS}
    sent: dict[str, list[float]] = {partitioner: [] for partitioner in PARTITIONERS}
    gathered = []
    for _ in range(DRAWS):
        loaded = _draw(rng, known[lengths], ranks)
        for partitioner in PARTITIONERS:
            settings = ShufflerSettings(partitioner)
            plan, taken = timed(partial(place, loaded, settings))
            times[partitioner].append(taken)
            of_ranks = [EXCHANGES["all_to_all"].traffic(plan, rank).sent for rank in range(ranks)]
            sent[partitioner].append(float(np.mean(of_ranks)))
        gathered.append(EXCHANGES["all_gather"].traffic(plan, 0).received)
    return {
        "partition_ms": {key: round(float(np.median(values)), 3) for key, values in times.items()},
        "kilobytes_sent_per_rank": {key: round(float(np.mean(of)) / 1e3, 2) for key, of in sent.items()},
        "kilobytes_received_by_all_gather": round(float(np.mean(gathered)) / 1e3, 1),
    }


def _draw(rng: np.random.Generator, lengths: Lengths, ranks: int) -> LoadedSamples:
    workloads, tokens = workloads_of(lengths(rng, ROWS_PER_RANK * ranks), HIDDEN_SIZE)
    rows = np.full(ranks, ROWS_PER_RANK)
    sizes = BYTES_PER_TOKEN * tokens
    return LoadedSamples(rows, rows, workloads, tokens, tokens, tokens[:, None], sizes, tokens[:, None])


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    training = {
        name: arm | {"name": name, "exposed_ms": _exposed_ms(arm)}
        for name, arm in figures["training"]["arms"].items()
    }
    of_training: dict[str, Cell] = {
        "exchange, partitioner": "{name}",
        "imbalance": "{imbalance:.3f}",
        "step, ms": "{step_ms[median]:.0f}",
        "planning thread, ms": "{planning_ms[median]:.2f}",
        "exposed, ms": "{exposed_ms:.1f}",
        "exchange, ms": "{exchange_ms[median]:.2f}",
        "wait for the plan, ms": "{wait_ms[median]:.3f}",
        "kB sent": "{kilobytes_sent[median]:.0f}",
    }
    alone = [
        arm | {"ranks": ranks, "features": features, "name": name}
        for ranks, by_features in figures["features"].items()
        for features, arms in by_features.items()
        for name, arm in arms.items()
    ]
    of_alone: dict[str, Cell] = {
        "ranks": "{ranks}",
        "features": "{features}",
        "exchange, partitioner": "{name}",
        "stage, ms": "{stage_ms[median]:.2f}",
        "exposed, ms": "{exposed_ms[median]:.2f} ({exposed_share_of_stage[median]:.0%})",
        "collectives": lambda arm: f"{sum(arm['collectives_per_step'].values()):.0f}",
        "kB sent": "{kilobytes_sent[median]:.0f}",
        "kB received": "{kilobytes_received[median]:.0f}",
    }
    case: dict[str, Cell] = {"lengths": "{lengths}", "ranks": "{ranks}"}
    times: dict[str, Cell] = {f"{name}, ms": f"{{partition_ms[{name}]:.2f}}" for name in PARTITIONERS}
    gathered: dict[str, Cell] = {"all_gather": "{kilobytes_received_by_all_gather:,.0f}"}
    sent: dict[str, Cell] = {f"all_to_all, {name}": partial(_sent, name) for name in PARTITIONERS}
    text = (
        "{cores} cores ({cpu}), torch {torch}, gloo, one thread per rank; "
        "medians, in training of {steps} steps."
    )
    return {
        "shuffle training": table(training.values(), of_training),
        "shuffle features": table(alone, of_alone),
        "shuffle planning": table(figures["planning"], case | times),
        "shuffle traffic": table(figures["planning"], case | gathered | sent),
        "shuffle machine": text.format(steps=figures["training"]["steps"], **figures["machine"]),
        "readme cost": _cost(training[f"all_to_all, {ShufflerSettings().partitioner}"]),
    }


def _sent(partitioner: str, record: Record) -> str:
    sent = record["kilobytes_sent_per_rank"][partitioner]
    return f"{sent:,.1f} (1/{record['kilobytes_received_by_all_gather'] / max(sent, 1e-9):,.0f})"


def _exposed_ms(arm: Record) -> float:
    """The median share of a step, of the median step."""
    return arm["exposed_share_of_step"]["median"] * arm["step_ms"]["median"]


def _cost(arm: Record) -> str:
    """Returns what the stage costs by default, as part of a sentence."""
    exposed, step = arm["exposed_ms"], arm["step_ms"]["median"]
    return (
        f"{exposed:.1f} ms per step in the stage, {arm['exchange_ms']['median']:.1f} ms of it exchanging "
        f"{arm['kilobytes_sent']['median']:.0f} kB: {exposed / step:.1%} of a CPU step of {step:.0f} ms, but "
        f"{exposed / SHORT_STEP_MS:.0%} of one of {SHORT_STEP_MS} ms"
    )
