"""Samples: their lengths, their tokens, and their costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ..perf_model.cost import Cost
from . import InputError
from .pieces import FLOPS, PieceCosts

# Training FLOPs ÷ forward FLOPs: the backward pass has two matrix products for each forward one.
TRAINING_FLOPS_PER_FORWARD = 3


@dataclass(frozen=True)
class TokenRule:
    """Tokens of a sample: `per_item` × its length + `extra`."""

    per_item: int
    extra: int

    def of(self, items: np.ndarray) -> np.ndarray:
        """Returns the tokens of samples with lengths `items`, both int64 `[samples]`."""
        return self.per_item * items + self.extra

    def __str__(self) -> str:
        scaled = "length" if self.per_item == 1 else f"{self.per_item} × length"
        return scaled if self.extra == 0 else f"{scaled} + {self.extra}"


# Defaults by model. HSTU has an action after each item and usually one user token. Most published SID-GR
# models encode an item as three codes.
TOKEN_RULES = {"hstu": TokenRule(2, 1), "sid_gr": TokenRule(3, 0), "transformer": TokenRule(1, 0)}


@dataclass(frozen=True)
class SampleLengths:
    """The samples of one epoch.

    Attributes:
        items: length of each sample, int64 `[samples]`.
        tokens: number of tokens that a model computes for each sample, int64 `[samples]`.
        token_rule: rule by which tokens follow from lengths, in words.
        source: origin of the lengths, in words.
        origin: figures that drawn lengths match, in a sentence without a period; None for other lengths.
    """

    items: np.ndarray
    tokens: np.ndarray
    token_rule: str
    source: str
    origin: str | None = None

    @cached_property
    def summary(self) -> dict[str, float]:
        """Statistics of `items`: "min" and "max", which are integers, "mean", "median", and "p99"."""
        median, p99 = np.percentile(self.items, [50, 99]).tolist()
        least, most = int(self.items.min()), int(self.items.max())
        return {"min": least, "mean": float(self.items.mean()), "median": median, "p99": p99, "max": most}


@dataclass(frozen=True)
class ConfiguredModel:
    """A model of known dimensions.

    Attributes:
        work: function that takes tokens, int64 `[samples]`, and returns the forward FLOPs of matrix products
            and of attention, int64 `[samples, 2]`.
        description: description in words.
        tokens: token rule for data that states only lengths.
        pieces: costs of pieces of samples in FLOPs.
    """

    work: Callable[[np.ndarray], np.ndarray]
    description: str
    tokens: TokenRule
    pieces: PieceCosts


@dataclass(frozen=True)
class SampleCost:
    """The cost to balance by, and the training time that it stands for.

    Attributes:
        model: model whose FLOPs enter the cost.
        cost: cost as a sum over samples, tokens, and FLOPs.
        assumption: assumption about the time of a step, in words.
        seconds_per_unit: seconds of training per unit of cost; None if unknown.
        setting: value of `balance_cost` with which training balances by the cost; None for FLOPs.
    """

    model: ConfiguredModel
    cost: Cost
    assumption: str
    seconds_per_unit: float | None = None
    setting: str | None = None

    @property
    def unit(self) -> str:
        """Unit of the loads."""
        return "FLOPs" if self.cost == FLOPS else "predicted ns"

    @property
    def pieces(self) -> PieceCosts:
        """The costs of pieces of samples."""
        return replace(self.model.pieces, cost=self.cost)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the workloads of samples from their tokens, both int64 `[samples]`.

        Raises:
            InputError: a sample costs more than int64 holds.
        """
        fewer, longest = np.ones(1, dtype=np.int64), int(tokens.max())
        while fewer[0] < longest:
            # A cost is at most quadratic, so twice the tokens cost at most four times as much.
            if not 0 <= self._costs(fewer)[0] < 2**60:
                raise InputError(
                    f"a sample of {longest} tokens costs more than 2^62 in {self.model.description}"
                )
            fewer *= 2
        return self._costs(tokens)

    def _costs(self, tokens: np.ndarray) -> np.ndarray:
        return self.cost.of(1, tokens, self.model.work(tokens))

    def step_times(self, largest_loads: np.ndarray) -> np.ndarray:
        """Returns each step's time from its largest load, in seconds if known, else in units of cost."""
        if self.seconds_per_unit is None:
            return largest_loads
        return self.cost.per_step * 1e-9 + self.seconds_per_unit * largest_loads


def flops_cost(model: ConfiguredModel, tflops: float | None) -> SampleCost:
    """Returns the cost in FLOPs. `tflops` is a device's rate in training, in 10¹² FLOP/s, None if unknown."""
    rate = "Without --tflops or --cost, only ratios are predicted"
    if tflops is not None:
        rate = f"Every device achieves {tflops:g} TFLOP/s at all lengths"
    assumption = (
        f"A step takes as long as its slowest rank computes: {TRAINING_FLOPS_PER_FORWARD} × the layers' "
        f"forward FLOPs (forward + backward). {rate}. Work that does not depend on lengths counts as 0: the "
        "more of it there is, the smaller the speedups. FLOPs also hide kernels that are slower at some "
        "lengths; a measured or learned cost (--cost) has them"
    )
    per_unit = None if tflops is None else TRAINING_FLOPS_PER_FORWARD / (tflops * 1e12)
    return SampleCost(model, FLOPS, assumption, per_unit)


def cost_from_file(path: Path, model: ConfiguredModel) -> SampleCost:
    """Reads a model's cost from a file that a calibration or a training run wrote.

    Raises:
        InputError: the file does not exist, does not hold a cost, or has other columns than the model.
    """
    try:
        cost = Cost.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--cost {path}: {error}") from error
    if cost.num_columns != FLOPS.num_columns:
        raise InputError(
            f"--cost {path} is for {cost.num_columns} columns of get_workloads; expected "
            f"{FLOPS.num_columns}, FLOPs of matrix products and of attention, as the models here have them"
        )
    assumption = (
        f"A step takes {f'{cost.per_step / 1e6:.3g} ms plus ' if cost.per_step else ''}the measured time of "
        f"the slowest rank's samples ({path}, median error {cost.median_error:.1%}); samples are balanced by "
        "these times"
    )
    return SampleCost(model, cost, assumption, seconds_per_unit=1e-9, setting=str(path))
