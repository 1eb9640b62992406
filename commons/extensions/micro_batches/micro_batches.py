"""Divides each rank's samples into micro-batches under a cap of tokens, and runs them in pipelines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ...checks import SettingError, require_type
from ...distributed.extension import Extension, Forward, Place
from ...distributed.placement import compile_from_scratch
from ...distributed.row_table import RowTable
from ...distributed.shuffle_plan import ShufflePlan
from ...distributed.slow_start import show_if_slow
from ...distributed.step import Step
from ...partition.packing import check_samples
from ...sequence_batch import BaseBatch
from ..row_objects import join, shared_in_results
from .divided_batch import COLUMN, micro_batch_of_rows, micro_batches, rows_of_micro_batches
from .division import divide_into_micro_batches, number_micro_batches, time_relative_to_mean
from .micro_batch_forward import check_no_hooks, run_micro_batches

if TYPE_CHECKING:
    from ...distributed.batch_shuffler import BatchShuffler

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class MicroBatches(Extension):
    """Divides each rank's samples into micro-batches, the same number on every rank.

    Pipelines run them one after another, and `progress` returns a list with the output of each; `join_values`
    makes one of it. A sample longer than the cap gets a micro-batch of its own, and a warning names it. The
    partitioner leaves tokens alone.

    Args:
        max_tokens: tokens of a micro-batch at most, as `get_tokens` counts them: by default all ids of a
            `BaseBatch`, of every feature, or all jagged elements of another batch.

    Raises:
        TypeError: `max_tokens` is no integer.
        ValueError: it is below 1; or, when a pipeline is made, its loss is a mean over all ranks.
    """

    name = "micro_batches"
    order = 20
    runs_in_parts = True

    def __init__(self, max_tokens: int) -> None:
        require_type("MicroBatches.max_tokens", max_tokens, int)
        if max_tokens < 1:
            raise SettingError("{max_tokens}: expected an integer of at least 1", max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.partitioner_arguments = {"token_tolerance": None}
        self._longest_named = max_tokens

    def settings(self) -> Mapping[str, Any]:
        """Returns the cap."""
        return {"max_tokens": self.max_tokens}

    def setup(self, shuffler: BatchShuffler) -> None:
        """Compiles the division where nothing else is compiled."""
        self._shuffler = shuffler
        if not shuffler.exchanges:
            with show_if_slow("compiling the division into micro-batches, or loading it from numba's cache"):
                self.warm_up()

    def warm_up(self) -> None:
        """Compiles the division."""
        compile_from_scratch()
        tokens = np.array([4, 4, 4, 3, 3])  # two micro-batches could hold so many, but not these
        divide_into_micro_batches(tokens, tokens, [np.arange(len(tokens))], 9)

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Divides the rows of every rank."""
        plan = divide(place(rows), self.max_tokens)
        self._name_sample_above_cap(plan)
        return plan

    def join(self, model: torch.nn.Module, device: torch.device, loss_reduction: str) -> None:
        """Checks that a micro-batch can be reduced by itself."""
        if loss_reduction == "global_mean":
            raise ValueError(
                'loss_reduction="global_mean" is for a whole step: with micro-batches return the mean over '
                'the loss tokens that the model was given, and use "mean"'
            )
        check_no_hooks(model)
        self._model, self._loss_reduction = model, loss_reduction

    def forward(self, step: Step, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Runs the micro-batches; the backward of their loss hands out all gradients."""
        if not step.plan.num_parts:
            return forward(step)
        model, reduction = self._model, self._loss_reduction
        return run_micro_batches(
            model, step.batch, self._shuffler, step.plan, reduction, step.scale_to_mean, step.failures
        )

    def report(self, plan: ShufflePlan) -> Mapping[str, Any]:
        """Returns the number of micro-batches, and their imbalance.

        That is the sum over k of the largest k-th micro-batch's load ÷ a rank's mean load. It takes the place
        of `imbalance_after` where ranks wait for each other after every micro-batch. The pipelines here wait
        once per step.
        """
        loads = micro_batch_loads(plan)
        return {"micro_batches": loads.shape[1], "micro_batch_imbalance": time_relative_to_mean(loads)}

    def micro_batches(self, batch: Batch, plan: ShufflePlan) -> list[Batch]:
        """Returns the micro-batches of a batch that `exchange` returned, in order; the batch alone if its
        plan has none. No host-device synchronization.

        Each has its samples in the order of the batch, and no padding. One without samples has one row:
        padding, or the first of the batch.
        """
        return micro_batches(self._shuffler, batch, plan)

    def join_values(self, values: Sequence[Any], plan: ShufflePlan) -> Any:
        """Puts per-sample values of micro-batches in the order of their batch's samples, as if it had run
        whole; two host-device synchronizations, of dense values one.

        Args:
            values: results of each micro-batch, with a row for each of its samples, or one of padding without
                any.
            plan: plan of the exchange.

        Raises:
            ValueError: there are more or fewer than micro-batches, with other rows, or of different kinds.
            TypeError: a list of tensors, whose entries may be samples; a tuple's are none.
        """
        rank = self._shuffler.group.rank
        rows_of_each = rows_of_micro_batches(plan, rank)
        if len(values) != len(rows_of_each):
            raise ValueError(
                f"got values of {len(values)} micro-batches, the plan has {len(rows_of_each)}: give a list "
                "with those of each"
            )
        counts = [len(rows) for rows in rows_of_each]
        shared = shared_in_results(values, self._shuffler.shared_fields, counts)
        num_rows = int(plan.num_rows[rank]) if isinstance(values[0], BaseBatch) else sum(counts)
        part_rows = [max(count, 1) for count in counts]
        return join(values, rows_of_each, part_rows, num_rows, shared, "join_values")

    def _name_sample_above_cap(self, plan: ShufflePlan) -> None:
        """Warns of a sample that takes a micro-batch of its own, if it is longer than all named before."""
        tokens = plan.rows.tokens
        ranks = self._shuffler.group
        if ranks.rank != 0 or tokens.max(initial=0) <= self._longest_named:
            return
        longest = int(tokens.argmax())
        rank, row = plan.rows.where_loaded(longest)
        self._longest_named = int(tokens[longest])
        logger.warning(
            f"row {row} of a batch of rank {ranks.ranks[rank]} has {self._longest_named} tokens, above "
            f"MicroBatches.max_tokens={self.max_tokens}: it gets a micro-batch of its own, which takes more "
            "memory than the cap allows; truncate histories, raise the cap, or override get_tokens, which "
            "counts them. Shorter ones will not be named"
        )


def divide(plan: ShufflePlan, max_tokens: int) -> ShufflePlan:
    """Returns the plan with the rows of every rank in micro-batches of at most `max_tokens`.

    They need not be even: ranks wait for each other once per step.
    """
    rows = plan.rows
    work, tokens, cap = check_samples(rows.workloads, rows.tokens, max_tokens)
    micro_batch, count = number_micro_batches(work, tokens, cap, plan.destination, plan.num_ranks, even=False)
    columns = {**rows.columns, COLUMN: micro_batch}
    return replace(plan, rows=replace(rows, columns=columns), num_parts=count)


def micro_batch_loads(plan: ShufflePlan) -> np.ndarray:
    """Returns float64 `[ranks, micro-batches]`, sums of workloads."""
    count = plan.num_parts
    slots = plan.destination * count + micro_batch_of_rows(plan)
    return np.bincount(slots, plan.rows.workloads, minlength=plan.num_ranks * count).reshape(-1, count)
