"""Trains the model on two ranks, as loaded, by default, and with `Padded`, in alternating steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import (
    Record,
    bootstrap_speedup,
    gather_from_ranks,
    list_cases,
    measure_cases,
    run_on_ranks,
    summarize,
    take_turns,
)
from benchmarks.markdown import make_table
from benchmarks.padded.by_length import Steps, load_by_length
from benchmarks.padded.lengths import KINDS, SHORT
from benchmarks.padded.model import OPTIMIZER, FlopsShuffler, PaddedModel, count_flops, make_batch
from benchmarks.partition.placements import ROWS_PER_RANK
from commons.distributed import BalanceReport
from commons.extensions.padded import Padded
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from commons.training import shard_model

RANKS, WARM_UP_STEPS, STEPS = 2, 2, 40
LONGEST = 256  # lengths are divided so that the longest has this many items, at most
AS_LOADED, DEFAULT, PADDED = "as loaded", "default", "`Padded`"
BY_LENGTH, JAGGED = "loaded by length", "jagged, default"


def draw_lengths(lengths: str, count: int) -> np.ndarray:
    """Returns random lengths of this kind that fit the model, int64 `[count]`."""
    drawn = KINDS[lengths](np.random.default_rng(0), count)
    return np.maximum(drawn // find_divisor(lengths), 1)


def find_divisor(lengths: str) -> int:
    """Returns the number that lengths of this kind are divided by, a power of two."""
    longest = int(KINDS[lengths](np.random.default_rng(0), 10_000).max())
    return 1 << max(-(-longest // LONGEST) - 1, 0).bit_length()


def measure_training(steps: int = STEPS) -> list[Record]:
    """Returns a record for each kind of lengths."""
    return run_on_ranks(RANKS, train, str(steps))


def train(device: torch.device, steps: str) -> list[Record]:
    """Trains on this rank, and returns a record for each kind of lengths."""
    return measure_cases(list_cases(lengths=KINDS), partial(_measure, device, int(steps)), "training")


class _Arm:
    """A run that is compared with others: a model, and its pipeline over this rank's batches."""

    def __init__(
        self, shuffler: FlopsShuffler, batches: Sequence[BaseBatch], device: torch.device, pads: bool = True
    ) -> None:
        torch.manual_seed(0)
        model, optimizer = shard_model(PaddedModel(pads), OPTIMIZER, device)
        self._pipeline = TrainPipelineFactory.create(
            "native", model, optimizer, device, batch_shuffler=shuffler, loss_reduction="sum"
        )
        self._batches = iter(batches)
        self._loss_sums: list[float] = []
        self._loss_tokens: list[float] = []
        self.seconds: list[float] = []
        self.reports: list[BalanceReport] = []

    def take_step(self, timed: bool = True) -> None:
        """Trains one step, and measures the time between barriers before and after it."""
        dist.barrier()
        start = time.perf_counter()
        self._pipeline.progress(self._batches)
        dist.barrier()
        if timed:
            self.seconds.append(time.perf_counter() - start)
            self.reports.append(self._pipeline.report)
            self._loss_sums.append(float(self._pipeline.loss_sum))
            self._loss_tokens.append(self._pipeline.loss_tokens)

    def losses(self) -> np.ndarray:
        """Returns the mean loss of each timed step over all ranks, float64 `[steps]`. Collective."""
        return np.sum(gather_from_ranks(self._loss_sums), 0) / np.array(self._loss_tokens)


def number_samples(steps: int) -> Steps:
    """Returns the samples of each step and rank, as loaded."""
    return list(np.arange(steps * RANKS * ROWS_PER_RANK).reshape(steps, RANKS, -1))


def _sort_by_length(lengths: np.ndarray, loaded: Steps) -> Steps:
    """Returns the same samples in steps of like lengths."""
    numbers = np.concatenate([part for step in loaded for part in step])
    by_length = load_by_length(count_flops(lengths[numbers]), RANKS)
    return [[numbers[part] for part in step] for step in by_length]


def _measure(device: torch.device, steps: int, lengths: str) -> Record:
    drawn = draw_lengths(lengths, (WARM_UP_STEPS + steps) * RANKS * ROWS_PER_RANK)
    loaded = number_samples(WARM_UP_STEPS + steps)
    by_length = loaded[:WARM_UP_STEPS] + _sort_by_length(drawn, loaded[WARM_UP_STEPS:])

    def make_arm(numbers: Steps, shuffler: FlopsShuffler, pads: bool = True) -> _Arm:
        return _Arm(shuffler, [make_batch(drawn, step[dist.get_rank()]) for step in numbers], device, pads)

    makers: dict[str, Callable[[], _Arm]] = {
        AS_LOADED: lambda: make_arm(loaded, FlopsShuffler(enabled=False)),
        DEFAULT: lambda: make_arm(loaded, FlopsShuffler()),
        PADDED: lambda: make_arm(loaded, FlopsShuffler(equal_rows=False, extensions=[Padded()])),
    }
    if lengths == SHORT:
        makers[BY_LENGTH] = lambda: make_arm(by_length, FlopsShuffler(enabled=False))
        makers[JAGGED] = lambda: make_arm(loaded, FlopsShuffler(), pads=False)
    arms = {name: make() for name, make in makers.items()}
    for arm in arms.values():
        for _ in range(WARM_UP_STEPS):
            arm.take_step(timed=False)
    for arm in take_turns(arms.values(), steps):
        arm.take_step()
    base = arms[AS_LOADED]
    return {
        "divisor": find_divisor(lengths),
        "steps": steps,
        "speedup_predicted": predict_speedup(arms[PADDED].reports),
        "arms": {name: _compare(base, arm, name != BY_LENGTH) for name, arm in arms.items()},
    }


def predict_speedup(reports: Sequence[BalanceReport]) -> float:
    """Returns the speedup over all steps that their plans predict."""
    before, after = (
        sum(getattr(report, name) * report.job_total_load for report in reports)
        for name in ("job_imbalance_before", "job_imbalance_after")
    )
    return round(before / after, 4)


def _compare(base: _Arm, arm: _Arm, has_same_steps: bool) -> Record:
    """Returns an arm's times, and how its losses differ from those of `base`. Collective."""
    losses, of_base = arm.losses(), base.losses()
    difference = float((np.abs(losses - of_base) / of_base).max())
    totals = [float(report.workloads.sum()) for report in arm.reports]
    return {
        "ms": summarize([1e3 * each for each in arm.seconds], 1),
        "speedup": round(sum(base.seconds) / sum(arm.seconds), 4),
        "speedup_interval": bootstrap_speedup(base.seconds, arm.seconds),
        "loss_difference": difference if has_same_steps else None,
        "largest_step": round(max(totals) / np.mean(totals).item(), 3),
    }


def tabulate_training(figures: Sequence[Record]) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    first = next(record for record in figures if record["lengths"] == SHORT)
    beside = [arm | {"name": name} for name, arm in first["arms"].items()]
    return {
        "padded training": make_table(map(_flatten, figures), _TRAINING),
        "padded gains": make_table(map(_flatten, figures), _GAINS),
        "padded beside": make_table(beside, _BESIDE),
        "padded steps": str(first["steps"]),
    }


_TRAINING = {
    "lengths": "{lengths}",
    "÷": "{divisor}",
    "as loaded, ms": "{as_loaded[ms][median]:.0f}",
    "default, ms": "{default[ms][median]:.0f}",
    "`Padded`, ms": "{padded[ms][median]:.0f}",
    "speedup": "{padded[speedup]:.2f} ({padded[speedup_interval][0]:.2f}–{padded[speedup_interval][1]:.2f})",
    "predicted": "{speedup_predicted:.2f}",
    "ratio": "{ratio:.2f}",
    "largest difference of a loss": lambda record: _show_difference(record["padded"]),
}
_GAINS = {
    name: _TRAINING[name] for name in ("lengths", "as loaded, ms", "default, ms", "`Padded`, ms", "speedup")
}
_BESIDE = {
    "on the first lengths": "{name}",
    "step, ms": "{ms[median]:.0f} ({ms[min]:.0f}–{ms[max]:.0f})",
    "speedup": "{speedup:.2f} ({speedup_interval[0]:.2f}–{speedup_interval[1]:.2f})",
    "work of the largest step ÷ mean": "{largest_step:.2f}",
    "largest difference of a loss": lambda arm: _show_difference(arm),
}


def _show_difference(arm: Record) -> str:
    difference = arm["loss_difference"]
    return "other steps" if difference is None else f"{difference:.0e}" if difference else "0"


def _flatten(record: Record) -> Record:
    """Returns a record with the arms of all kinds of lengths, and measured ÷ predicted speedup."""
    names = {"as_loaded": AS_LOADED, "default": DEFAULT, "padded": PADDED}
    arms = {key: record["arms"][name] for key, name in names.items()}
    return record | arms | {"ratio": arms["padded"]["speedup"] / record["speedup_predicted"]}
