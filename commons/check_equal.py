"""Checks on one's own model and data that balancing leaves training as it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from .distributed.rank_group import RankGroup

# How many of the largest differences are shown.
_SHOWN = 5
# Differences of what was learned, in tolerances of losses: gradients cancel where they are added up.
_LEARNED = 5
# An allowance: roundings of an element per step, and the share of a change that they may hide.
_ROUNDINGS, _MOST_ROUNDING = 4, 0.1
_CAUSES = (
    "a sample's loss depends on the samples beside it (dropout, batch normalization, in-batch negatives, a "
    'scale by the longest sequence of the batch), get_loss_tokens does not count what the model\'s "mean" '
    "divides by, or a gradient cancels to rounding alone, as that of the bias of a softmax's keys: compare "
    "without that parameter"
)

MakePipeline = Callable[[bool], tuple[Any, Iterable[Any]]]


class DifferentTrainingError(AssertionError):
    """Training with balancing is not that without; raised on all ranks."""


@dataclass(frozen=True)
class EqualityReport:
    """Training with balancing on, compared with training with it off.

    Attributes:
        losses: float64 `[2, steps]`, mean loss of each step over all loss tokens, off and on.
        differences: norm of the difference ÷ norm of the change, of each parameter, buffer and table; those
            first that exceed tolerance and rounding most.
        rounding: part of these that rounding to float32 explains.
        tolerance: tolerance of losses; differences may be 5 times that, and rounding, because gradients
            cancel.
        samples_moved: samples moved in all steps.
        imbalance: mean over the steps, as loaded and balanced.
        suspects: modules whose output depends on other samples or on chance, "name (type)".
    """

    losses: np.ndarray
    differences: dict[str, float]
    rounding: dict[str, float]
    tolerance: float
    samples_moved: int
    imbalance: tuple[float, float]
    suspects: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether losses, and all that was learned, differ by no more than the tolerance and rounding."""
        learned = all(value <= self.allowed(name) for name, value in self.differences.items())
        return learned and self.loss_difference <= self.tolerance

    def allowed(self, name: str) -> float:
        """Returns how large a difference may be."""
        return _LEARNED * self.tolerance + self.rounding[name]

    @property
    def loss_difference(self) -> float:
        """The largest relative difference of a step's loss."""
        off, on = self.losses
        return float((np.abs(on - off) / np.maximum(np.abs(off), np.finfo(np.float32).tiny)).max())

    def __str__(self) -> str:
        shown = list(self.differences.items())[:_SHOWN]
        first, last = self.losses[0, [0, -1]]
        suspects = [f"look at {', '.join(self.suspects[:_SHOWN])}"] if self.suspects else []
        return "\n".join(
            [
                f"{'equal' if self.is_equal else 'not equal'}: {self.losses.shape[1]} steps, "
                f"{self.samples_moved} samples moved, imbalance "
                f"{self.imbalance[0]:.2f} → {self.imbalance[1]:.2f}",
                f"the mean loss goes from {first:.4g} to {last:.4g}, and differs by at most "
                f"{self.loss_difference:.0e}",
                *(
                    f"{name} differs by {value:.0e} of what training changed; {self.allowed(name):.0e} are "
                    "allowed"
                    for name, value in shown
                ),
                *([] if self.is_equal else suspects),
            ]
        )


def check_equal(
    make_pipeline: MakePipeline, steps: int = 5, tolerance: float = 1e-4, seed: int = 0
) -> EqualityReport:
    """Trains with balancing off, then on, from the same seed, and compares all that was learned. Collective.

    Use float32 and plain SGD with a learning rate that shows: an optimizer that divides by gradients, such
    as Adam, enlarges the rounding of those near zero. What both runs share is not found: under "sum", a loss
    that is divided by a wrong constant, say. Compare a step with one process on the whole batch for that.

    Args:
        make_pipeline: function that takes `enabled`, for `MyShuffler(enabled=enabled)`, and returns a
            pipeline and its batches: the same model and batches each time. It is called with False, then with
            True, right after the generators of random, numpy and torch were seeded.
        steps: number of steps to train, at most; fewer if the batches end.
        tolerance: tolerance of losses, relative to them. Parameters and tables may differ by 5 times that,
            and by what rounding explains, relative to their change.
        seed: seed of the generators, the same on all ranks.

    Returns:
        The largest differences, with their names; `print` it.

    Raises:
        DifferentTrainingError: the two differ by more; with the differences, and what the usual causes are.
        ValueError: no sample moved, or a parameter changed too little or is not finite with balancing off, so
            that nothing was compared; or models or batches differ from the start.
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
    # Sums of weights, over several sets of ranks that balance, may differ in their last bits.
    if len(off.losses) != len(on.losses) or not np.allclose(off.loss_tokens, on.loss_tokens, 1e-12, 0):
        raise ValueError(
            "make_pipeline gives other batches each time: loss tokens of the steps are "
            f"{off.loss_tokens}, then {on.loss_tokens}"
        )
    broken = [name for name, value in off.end.items() if not _minus(value, off.start[name]).isfinite().all()]
    if found := _of_all_ranks(broken):
        raise ValueError(
            f"{found[0]} is not finite after training with balancing off, so that there is nothing to "
            "compare with: mend that first, or lower the learning rate"
        )
    # Each set of ranks that balance together counts its own.
    moved = RankGroup.of().all_gather_objects(on.samples_moved / on.num_ranks)
    if not any(moved):
        raise ValueError(
            "no sample moved in any step, so that nothing was compared: take batches whose costs differ, and "
            "pass enabled on, as in MyShuffler(enabled=enabled)"
        )
    differences, rounding = _differences(off, on, tolerance)
    report = EqualityReport(
        losses=np.array([off.losses, on.losses]),
        differences=differences,
        rounding=rounding,
        tolerance=tolerance,
        samples_moved=round(sum(moved)),
        imbalance=(float(np.mean(off.imbalance)), float(np.mean(on.imbalance))),
        suspects=on.suspects,
    )
    if not report.is_equal:
        raise DifferentTrainingError(f"balancing changes training; most likely {_CAUSES}.\n{report}")
    if hidden := [name for name, share in rounding.items() if share > _MOST_ROUNDING]:
        raise ValueError(
            f"{hidden[0]} changes so little that rounding hides {rounding[hidden[0]]:.0%} of it, so that it "
            "is not compared: raise the learning rate, or train more steps; and look at the loss, which is "
            f'too small if loss_reduction is "sum" and the model returns a mean.\n{report}'
        )
    return report


@dataclass
class _Run:
    """The result of one training; tensors are on the host."""

    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]
    losses: list[float]
    loss_tokens: list[int | float]
    imbalance: list[float]
    samples_moved: int
    num_ranks: int
    suspects: tuple[str, ...]


def _train(make_pipeline: MakePipeline, enabled: bool, steps: int, seed: int) -> _Run:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    pipeline, batches = make_pipeline(enabled)
    model, loader = pipeline._model, iter(batches)
    start = _state(model)
    losses: list[float] = []
    loss_tokens, reports = [], []
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
    moved = sum(report.samples_moved for report in reports)
    imbalance, num_ranks = [report.job_imbalance_after for report in reports], len(reports[0].loads_after)
    return _Run(start, _state(model), losses, loss_tokens, imbalance, moved, num_ranks, _suspects(model))


def _suspects(model: nn.Module) -> tuple[str, ...]:
    """Returns modules, by name and type, that normalize over a batch or drop at random."""
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
        parts = [getattr(shard, "tensor", shard) for shard in shards]  # those of a DTensor are tensors
        for number, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                suffix = f"[{number}]" if len(parts) > 1 else ""
                found[name + suffix] = part.detach().to("cpu", torch.float64, copy=True)
    return found


def _differences(off: _Run, on: _Run, tolerance: float) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the norms of differences over all ranks ÷ those of changes; and of what rounding to float32 may
    do to the elements that change. Those that exceed the tolerance and that come first. Collective."""
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
    """Returns the difference, with 0 where infinity is on both sides, as in a mask among the buffers."""
    return (one - other).masked_fill(one == other, 0.0)


def _of_all_ranks(names: list[str]) -> list[str]:
    """Returns the names of all ranks; collective."""
    return [name for of_rank in RankGroup.of().all_gather_objects(names) for name in of_rank]
