"""Checks that balancing leaves the training of your own model and data as it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist

from .distributed import BalanceReport
from .distributed.ranks import RankGroup
from .pipeline.shuffle_stage import ShuffleStage, losses_and_output
from .sequence_batch.tree import move_to

__all__ = ["check_equal"]

# Number of largest differences to show.
_SHOWN = 5
# Differences of learned values may be this many times the tolerance, because gradients cancel in sums.
_LEARNED = 5
# Roundings allowed per element, and the largest share of a change that they may hide.
_ROUNDINGS, _MOST_ROUNDING = 4, 0.1
_CAUSES = (
    "a sample's loss depends on the samples beside it (dropout, batch normalization, in-batch negatives, "
    "attention to padding, pairs or lists of rows, which SampleGroups(strict=True) keeps whole, numbers of "
    "rows, a scale by the longest sequence of the batch), get_loss_tokens does not count what the model's "
    '"mean" divides by, or '
)
_OF_ROUNDING = (
    "a gradient cancels to rounding alone, as that of the bias of a softmax's keys: compare without that "
    "parameter"
)
_MAGNIFIED = "rounding is magnified, because {}: compare with SGD and float32"
# By kind of loss, the loss of rows given twice ÷ that of rows given once; and its relative tolerance.
_TWICE, _CLOSE = {"mean": 1.0, "sum": 2.0}, 1e-3

MakePipeline = Callable[[bool], tuple[Any, Iterable[Any]]]


class DifferentTrainingError(AssertionError):
    """Training with balancing differs from training without it. Raised on all ranks."""


@dataclass(frozen=True)
class EqualityReport:
    """A comparison of training with balancing on and off.

    Attributes:
        losses: float64 `[2, steps]`, mean loss of each step over all loss tokens; balancing off, then on.
        differences: norm of the difference ÷ norm of the change, for each parameter, buffer and table. Those
            that exceed tolerance and rounding most come first.
        rounding: part of each difference that rounding to float32 may explain.
        tolerance: relative tolerance of losses.
        samples_moved: number of samples that moved, over all steps.
        imbalance: mean imbalance over the steps, as loaded and as balanced.
        loss_tokens: mean number of loss tokens in a step of all ranks.
        suspects: modules whose output depends on other samples or on chance, as "name (type)".
    """

    losses: np.ndarray
    differences: dict[str, float]
    rounding: dict[str, float]
    tolerance: float
    samples_moved: int
    imbalance: tuple[float, float]
    loss_tokens: float
    suspects: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether losses and learned values differ by no more than the tolerance and rounding."""
        learned = all(value <= self.allowed(name) for name, value in self.differences.items())
        return learned and self.loss_difference <= self.tolerance

    def allowed(self, name: str) -> float:
        """Returns the largest difference that a parameter, buffer or table may have."""
        return _LEARNED * self.tolerance + self.rounding[name]

    @property
    def loss_difference(self) -> float:
        """The largest relative difference between the two losses of a step."""
        off, on = self.losses
        return float((np.abs(on - off) / np.maximum(np.abs(off), np.finfo(np.float32).tiny)).max())

    def __str__(self) -> str:
        first, last = self.losses[0, [0, -1]]
        lines = [
            f"{'equal' if self.is_equal else 'not equal'}: {self.losses.shape[1]} steps, "
            f"{self.samples_moved} samples moved, imbalance "
            f"{self.imbalance[0]:.2f} -> {self.imbalance[1]:.2f}",
            f"the mean loss of {self.loss_tokens:.0f} loss tokens goes from {first:.4g} to {last:.4g}, and "
            f"differs by at most {self.loss_difference:.0e}",
        ]
        for name, value in list(self.differences.items())[:_SHOWN]:
            allowed = self.allowed(name)
            lines.append(
                f"{name} differs by {value:.0e} of what training changed; the limit is {allowed:.0e}"
            )
        if self.suspects and not self.is_equal:
            lines.append(f"look at {', '.join(self.suspects[:_SHOWN])}")
        return "\n".join(lines)


def check_equal(
    make_pipeline: MakePipeline, steps: int = 5, tolerance: float = 1e-4, seed: int = 0
) -> EqualityReport:
    """Trains with balancing off, then on, from the same seed, and compares the results. Collective.

    Use float32 and plain SGD, with a learning rate that changes the model visibly. Optimizers such as Adam
    divide by gradients, and so magnify rounding near zero. Before each run, the model runs twice on half of
    the first batch, without gradients, to tell a mean from a sum. Other errors that both runs share go
    unnoticed. To find those, compare a step with one process on the whole batch.

    Args:
        make_pipeline: function that takes `enabled`, for `MyShuffler(enabled=enabled)`, and returns a
            pipeline and its batches, the same model and batches each time. The function gets False first,
            and then True, each time right after the generators of random, numpy and torch are seeded.
        steps: maximum number of steps. Training ends earlier if the batches do.
        tolerance: relative tolerance of losses. Parameters and tables may differ by 5 times this share of
            their change, plus rounding.
        seed: seed of the generators, the same on all ranks.

    Returns:
        A report. Print it to see the largest differences, with their names.

    Raises:
        DifferentTrainingError: the two runs differ by more. The message has them, and their usual causes.
        TypeError: `make_pipeline` returns no pipeline with the stage.
        ValueError: `loss_reduction` is "sum" and the model returns a mean, or the other way round. Or
            the comparison is void: there are no batches, no sample moved, a parameter changed too little or
            is not finite with balancing off, or the runs differ in initial model or batches.
    """
    off, on = (_train(make_pipeline, enabled, steps, seed) for enabled in (False, True))
    differing = [
        name for name in off.start if name not in on.start or not off.start[name].equal(on.start[name])
    ]
    if found := _of_all_ranks(differing):
        raise ValueError(
            f"make_pipeline makes another model each time: {found[0]} starts with other values; seed what "
            "initializes it, or load the same state"
        )
    # Loss tokens may be weights, whose sums over several sets of ranks may differ in their last bits.
    if len(off.losses) != len(on.losses) or not np.allclose(off.loss_tokens, on.loss_tokens, 1e-12, 0):
        raise ValueError(
            "make_pipeline gives other batches each time: loss tokens of the steps are "
            f"{off.loss_tokens}, then {on.loss_tokens}"
        )
    broken = [name for name, value in off.end.items() if not _minus(value, off.start[name]).isfinite().all()]
    if found := _of_all_ranks(broken):
        raise ValueError(
            f"{found[0]} is not finite after training with balancing off, so that there is nothing to "
            "compare with: fix that first, or lower the learning rate"
        )
    # Each set of ranks that balance together counts only its own samples.
    own_moved = sum(report.samples_moved for report in on.reports) / len(on.reports[0].loads_after)
    moved = RankGroup.of().all_gather_objects(own_moved)
    if not any(moved):
        raise ValueError(
            "no sample moved in any step, so that nothing was compared: take batches whose costs differ, and "
            "pass enabled on, as in MyShuffler(enabled=enabled)"
        )
    differences, rounding = _differences(off, on, tolerance)
    losses = np.array([off.losses, on.losses])
    before, after = (float(np.mean([of.job_imbalance_after for of in run.reports])) for run in (off, on))
    report = EqualityReport(
        losses,
        differences,
        rounding,
        tolerance,
        round(sum(moved)),
        (before, after),
        float(np.mean(on.loss_tokens)),
        on.suspects,
    )
    if not report.is_equal:
        reasons = _of_all_ranks(on.magnifies)
        last = _MAGNIFIED.format(" and ".join(dict.fromkeys(reasons))) if reasons else _OF_ROUNDING
        raise DifferentTrainingError(f"balancing changes training; most likely {_CAUSES}{last}.\n{report}")
    if hidden := [name for name, share in rounding.items() if share > _MOST_ROUNDING]:
        raise ValueError(
            f"{hidden[0]} changes so little that rounding hides {rounding[hidden[0]]:.0%} of it, so that it "
            "is not compared: raise the learning rate, or train more steps; and look at the loss, which is "
            f'too small if loss_reduction is "sum" and the model returns a mean.\n{report}'
        )
    return report


@dataclass
class _Run:
    """The result of one training run, with tensors on the host."""

    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]
    losses: list[float]
    loss_tokens: list[int | float]
    reports: list[BalanceReport]
    suspects: tuple[str, ...]
    magnifies: list[str]


def _train(make_pipeline: MakePipeline, enabled: bool, steps: int, seed: int) -> _Run:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    pipeline, batches = make_pipeline(enabled)
    if not isinstance(getattr(pipeline, "_stage", None), ShuffleStage):
        raise TypeError(
            f"make_pipeline returns {pipeline!r}; expected a pipeline with the stage. For a loop of your "
            'own, make the pipeline "none" with its model and its shuffler'
        )
    model, loader = pipeline._model, iter(batches)
    start = _state(model)
    loader = _check_reduction(pipeline, loader)
    losses, loss_tokens, reports = list[float](), [], []
    while len(losses) < steps:
        try:
            pipeline.progress(loader)
        except StopIteration:
            break
        total = pipeline.loss_sum.double()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(float(total) / (pipeline.loss_tokens or 1))
        loss_tokens.append(pipeline.loss_tokens)
        reports.append(pipeline.report)
    pipeline.reset()
    if not losses:
        raise ValueError("make_pipeline gives no batches, so that nothing was compared")
    magnifies = _magnifies(model, pipeline._optimizer)
    return _Run(start, _state(model), losses, loss_tokens, reports, _suspects(model), magnifies)


def _check_reduction(pipeline: Any, loader: Iterator[Any]) -> Iterator[Any]:
    """Raises a ValueError on every rank if the model's loss is a mean, and the pipeline was told that it is a
    sum, or the other way round. Returns an iterator over all batches of `loader`. Collective.

    If each row is there twice, a mean stays as it is, and a sum doubles.
    """
    first = list(itertools.islice(loader, 1))
    rest = itertools.chain(first, loader)
    reduction = pipeline._stage._loss_reduction
    rows = [pipeline._stage._shuffler.view(batch) for batch in first]
    can_run = [bool(of.num_samples) for of in rows] == [True]
    # Tables in a GPU's cache are fetched before a forward. A "global_mean" divides by its own count.
    cannot = isinstance(pipeline, PrefetchTrainPipelineSparseDist) or reduction not in _TWICE
    if cannot or not all(RankGroup.of().all_gather_objects(can_run)):
        return rest
    half, packed = np.arange(-(-rows[0].num_samples // 2)), [rows[0].packed()]
    losses = [np.nan, np.nan]
    with torch.random.fork_rng(), torch.no_grad(), suppress(Exception):  # it may need all of its rows
        for number, chosen in enumerate((half, np.repeat(half, 2))):
            batch = move_to(rows[0].select(packed, chosen, len(chosen)), pipeline._device)
            losses[number] = float(losses_and_output(pipeline._model(batch))[0].double().sum())
    once, twice = np.mean(RankGroup.of().all_gather_objects(losses), axis=0)
    other = "mean" if reduction == "sum" else "sum"
    # A penalty on parameters, or rows that depend on each other, may give any other ratio.
    if np.isfinite([once, twice]).all() and once and abs(twice / once / _TWICE[other] - 1) < _CLOSE:
        raise ValueError(
            f"loss_reduction is {reduction!r}, and the model returns a {other}: its loss is {once:.4g} for "
            f'some rows, and {twice:.4g} for the same rows twice. Use "{other}", or, if the model divides by '
            "a fixed number, have it divide by its number of loss tokens"
        )
    return rest


def _magnifies(model: nn.Module, optimizer: Any) -> list[str]:
    """Returns the reasons for which rounding may grow: an adaptive optimizer, or narrow parameters."""
    states = [state for state in dict(getattr(optimizer, "state", {})).values() if isinstance(state, dict)]
    adapts = any(not key.endswith(("step", "momentum_buffer")) for state in states for key in map(str, state))
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    narrow = sorted(str(dtype) for dtype in dtypes if torch.finfo(dtype).bits < 32)
    found = ["the optimizer divides by gradients"] if adapts else []
    return found + [f"parameters are of {dtype}" for dtype in narrow]


def _suspects(model: nn.Module) -> tuple[str, ...]:
    """Returns the modules that normalize over a batch or drop at random, as "name (type)"."""
    normalizing = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    dropping = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return tuple(
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, normalizing) or (isinstance(module, dropping) and module.p > 0)
    )


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of this rank's floating-point parameters, buffers and rows of tables, by name."""
    found = {}
    for name, value in model.state_dict().items():
        local = value.to_local() if hasattr(value, "to_local") else value
        shards = local.local_shards() if hasattr(local, "local_shards") else [local]
        parts = [getattr(shard, "tensor", shard) for shard in shards]  # shards of a DTensor are tensors
        for number, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                suffix = f"[{number}]" if len(parts) > 1 else ""
                found[name + suffix] = part.detach().to("cpu", torch.float64, copy=True)
    return found


def _differences(off: _Run, on: _Run, tolerance: float) -> tuple[dict[str, float], dict[str, float]]:
    """Returns `differences` and `rounding` as `EqualityReport` has them: norms over all ranks, ÷ the norm of
    the change. Rounding only counts for elements that change. Collective."""
    every = sorted(set(_of_all_ranks([*off.end])))
    squares = torch.zeros(len(every), 3, dtype=torch.float64)
    for row, name in zip(squares, every, strict=True):
        if name in off.end:
            before, one, other = off.start[name], off.end[name], on.end[name]
            changed = (one != before) | (other != before)
            row[0], row[1] = _minus(other, one).square().sum(), _minus(one, before).square().sum()
            row[2] = one[changed].square().sum()
    difference, change, size = torch.stack(RankGroup.of().all_gather_objects(squares)).sum(0).sqrt().unbind(1)
    rounding = _ROUNDINGS * torch.finfo(torch.float32).eps * size
    relative = torch.where(difference == 0, 0.0, difference / change)  # NaN stays
    shares = torch.where(rounding > 0, rounding / change, 0.0)
    order = (relative / (_LEARNED * tolerance + shares)).argsort(descending=True, stable=True).tolist()
    return {every[at]: float(relative[at]) for at in order}, {every[at]: float(shares[at]) for at in order}


def _minus(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the difference, which is 0 where both are infinite, as in a mask among the buffers."""
    return (one - other).masked_fill(one == other, 0.0)


def _of_all_ranks(names: list[str]) -> list[str]:
    """Returns the names of all ranks in one list. Collective."""
    return [name for of_rank in RankGroup.of().all_gather_objects(names) for name in of_rank]
