"""Steps of a training run, drawn from the samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commons.advisor.input_error import InputError

SEED = 0
# So many samples are drawn, as far as that is no fewer and no more steps than these: what a step of few ranks
# takes differs more from step to step, and costs less to plan.
SAMPLES_TO_DRAW = 2**18
FEWEST_STEPS, MOST_STEPS = 32, 256


@dataclass(frozen=True)
class LoadedSteps:
    """Samples of consecutive steps, as the ranks load them: step by step, within a step rank by rank.

    Attributes:
        num_ranks, num_steps: each rank loads as many samples in each step.
        workloads, tokens, sizes: int64 `[steps · ranks · rows]`; sizes are bytes.
    """

    num_ranks: int
    num_steps: int
    workloads: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray

    @property
    def home(self) -> np.ndarray:
        """int64 `[steps · ranks · rows]`, the rank that loads each sample."""
        rows = len(self.workloads) // (self.num_steps * self.num_ranks)
        return np.tile(np.repeat(np.arange(self.num_ranks), rows), self.num_steps)

    @property
    def as_loaded(self) -> list[list[np.ndarray]]:
        """For each step and rank its samples where nothing moves."""
        parts = np.split(np.arange(len(self.workloads)), self.num_steps * self.num_ranks)
        return [parts[first : first + self.num_ranks] for first in range(0, len(parts), self.num_ranks)]


@dataclass(frozen=True)
class DrawnSteps:
    """Steps in the order of training.

    Attributes:
        num_ranks, rows_per_rank: of each step.
        workloads, tokens, sizes: int64 `[steps, ranks · rows]`, as in `LoadedSteps`.
        num_epochs: orders of the samples that they come from.
    """

    num_ranks: int
    rows_per_rank: int
    workloads: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray
    num_epochs: int

    @property
    def num_steps(self) -> int:
        """Steps that were drawn."""
        return len(self.workloads)

    def groups(self, steps_per_group: int) -> Iterator[LoadedSteps]:
        """So many steps at a time; `steps_per_group` divides their number."""
        for first in range(0, self.num_steps, steps_per_group):
            some = slice(first, first + steps_per_group)
            yield LoadedSteps(
                num_ranks=self.num_ranks,
                num_steps=steps_per_group,
                workloads=self.workloads[some].ravel(),
                tokens=self.tokens[some].ravel(),
                sizes=self.sizes[some].ravel(),
            )


def draw_steps(
    workloads: np.ndarray,
    tokens: np.ndarray,
    sizes: np.ndarray,
    num_ranks: int,
    rows_per_rank: int,
    multiple_of: int,
) -> DrawnSteps:
    """The first steps of an epoch in random order, without replacement, and of further epochs if it is short.

    Incomplete steps at the end of an epoch are left out. The orders are the same for all numbers of ranks.

    Args:
        workloads, tokens, sizes: int64 `[samples]`.
        num_ranks, rows_per_rank: of each step.
        multiple_of: the number of steps is a multiple of it.

    Raises:
        InputError: there are fewer samples than one step needs.
    """
    per_step = num_ranks * rows_per_rank
    if per_step > len(workloads):
        raise InputError(
            f"{len(workloads)} samples; a step of {num_ranks} ranks × {rows_per_rank} rows needs {per_step}: "
            "lower --ranks or --rows-per-rank"
        )
    wanted = min(max(SAMPLES_TO_DRAW // per_step, FEWEST_STEPS), MOST_STEPS)
    wanted = -(-wanted // multiple_of) * multiple_of
    per_epoch = len(workloads) // per_step
    num_epochs = -(-wanted // per_epoch)
    order = np.concatenate(
        [_epoch_order(len(workloads), epoch, per_epoch * per_step) for epoch in range(num_epochs)]
    )
    order = order[: wanted * per_step].reshape(wanted, per_step)
    return DrawnSteps(num_ranks, rows_per_rank, workloads[order], tokens[order], sizes[order], num_epochs)


def _epoch_order(num_samples: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([SEED, epoch]).permutation(num_samples)[:count]
