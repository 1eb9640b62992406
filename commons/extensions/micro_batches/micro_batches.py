"""Divides each rank's samples into micro-batches under a token cap, and runs them in pipelines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ...checks import SettingError, require_type
from ...distributed.exchange import Step
from ...distributed.extension import Extension, Forward, Place
from ...distributed.placement import compile_from_scratch
from ...distributed.plan import MICRO_BATCH, RowTable, ShufflePlan
from ...sequence_batch import BaseBatch
from ..row_objects import join, shared_in_results
from .divided_batch import micro_batch_of_rows, micro_batches, rows_of_micro_batches
from .division import number_micro_batches, time_relative_to_mean
from .micro_batch_forward import check_no_hooks, run_micro_batches
from .packing import check_samples

if TYPE_CHECKING:
    from ...distributed.shuffler import BatchShuffler

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class MicroBatches(Extension):
    """Divides each rank's samples into micro-batches, the same number on every rank.

    Pipelines run the micro-batches one after another, and `progress` returns a list of their outputs, which
    `join_values` joins. A sample longer than the cap gets a micro-batch of its own, and a warning names it.
    The partitioner does not even out tokens.

    Args:
        max_tokens: largest number of tokens in a micro-batch, as `get_tokens` counts them. By default, these
            are the ids of all features of a `BaseBatch`, or all jagged elements of another batch.

    Raises:
        TypeError: `max_tokens` is not an integer.
        ValueError: `max_tokens` is below 1. When a pipeline is made: its loss is a mean over all ranks, or a
            parameter has a hook on its gradient.
    """

    name = "micro_batches"
    order = 20
    runs_in_parts = computes_alone = True

    def __init__(self, max_tokens: int) -> None:
        require_type("MicroBatches.max_tokens", max_tokens, int)
        if max_tokens < 1:
            raise SettingError("{max_tokens}: expected an integer of at least 1", max_tokens=max_tokens)
        self.max_tokens = max_tokens
        # An extension that pads divides by its own rule, up to this many padded tokens.
        self.partitioner_arguments = {"token_tolerance": None, "micro_batch_tokens": max_tokens}
        self._longest_named = max_tokens

    def settings(self) -> Mapping[str, Any]:
        """Returns the token cap."""
        return {"max_tokens": self.max_tokens}

    def setup(self, shuffler: BatchShuffler) -> None:
        """Compiles the division, if the shuffler does not exchange and so compiles nothing itself."""
        self._shuffler = shuffler
        if not shuffler.exchanges:
            self.warm_up()

    def warm_up(self) -> None:
        """Compiles the division."""
        compile_from_scratch()
        tokens = np.array([4, 4, 4, 3, 3])  # 2 × 9 tokens, yet two micro-batches cannot hold them
        number_micro_batches(tokens, tokens, 9, np.zeros_like(tokens), 1)

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Places rows, and divides those of every rank into micro-batches, unless placement has done so."""
        plan = place(rows)
        if not plan.num_parts:
            plan = divide(plan, self.max_tokens)
        self._name_sample_above_cap(plan)
        return plan

    def join(self, model: torch.nn.Module, device: torch.device, loss_reduction: str) -> None:
        """Checks that the loss reduction and the hooks of the model allow micro-batches."""
        if loss_reduction == "global_mean":
            raise ValueError(
                'loss_reduction="global_mean" is for a whole step: with micro-batches return the mean over '
                'the loss tokens that the model was given, and use "mean"'
            )
        check_no_hooks(model)
        self._model, self._loss_reduction = model, loss_reduction

    def forward(self, step: Step, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Runs the micro-batches. The backward of the returned loss hands out all gradients."""
        if not step.plan.num_parts:
            return forward(step)
        model, reduction = self._model, self._loss_reduction
        return run_micro_batches(
            model, step.batch, self._shuffler, step.plan, reduction, step.scale_to_mean, step.failures
        )

    def report(self, plan: ShufflePlan) -> Mapping[str, Any]:
        """Returns the number of micro-batches, and their imbalance.

        The imbalance is the sum over k of the largest load of a k-th micro-batch, ÷ the mean load of a rank.
        It replaces `imbalance_after` if ranks wait for each other after every micro-batch. The pipelines here
        wait only once per step.
        """
        count = plan.num_parts
        slots = plan.destination * count + micro_batch_of_rows(plan)
        loads = np.bincount(slots, plan.rows.workloads, minlength=plan.num_ranks * count).reshape(-1, count)
        return {"micro_batches": count, "micro_batch_imbalance": time_relative_to_mean(loads)}

    def micro_batches(self, batch: Batch, plan: ShufflePlan) -> list[Batch]:
        """Returns the micro-batches of an exchanged batch in order, or only the batch if its plan has none.

        A micro-batch has its samples in the order of the batch, and no padding. Without samples, it has one
        row: padding, or the first row of the batch. No host-device synchronization.
        """
        return micro_batches(self._shuffler, batch, plan)[0]

    def join_values(self, values: Sequence[Any], plan: ShufflePlan) -> Any:
        """Joins per-sample values of micro-batches in the order of the batch, as if the batch had run whole.

        If there are jagged values, the host waits once for the device.

        Args:
            values: results of each micro-batch, with a row per sample, or one padding row without samples.
            plan: plan of the exchange.

        Raises:
            ValueError: `values` are not one per micro-batch, have wrong numbers of rows, or differ in kind.
            TypeError: a result has a list of tensors that may be samples. Tuples never count as samples.
        """
        rank = self._shuffler.group.rank
        rows_of_each = rows_of_micro_batches(plan, rank)
        counts = [len(rows) for rows in rows_of_each]
        shared = shared_in_results(values, self._shuffler.shared_fields, counts)
        num_rows = int(plan.num_rows[rank]) if isinstance(values[0], BaseBatch) else sum(counts)
        part_rows = [max(count, 1) for count in counts]
        return join(values, rows_of_each, part_rows, num_rows, shared, "join_values")

    def _name_sample_above_cap(self, plan: ShufflePlan) -> None:
        """Warns of the longest sample above the cap, if it is longer than all samples named before."""
        tokens = plan.rows.tokens
        ranks = self._shuffler.group
        if ranks.rank != 0 or tokens.max(initial=0) <= self._longest_named:
            return
        longest = int(tokens.argmax())
        rank, row = plan.rows.where_loaded(longest)
        self._longest_named = int(tokens[longest])
        logger.warning(
            f"row {row} of a batch of rank {ranks.ranks[rank]} has {self._longest_named} tokens, above "
            f"MicroBatches.max_tokens={self.max_tokens}: it gets a micro-batch of its own. Truncate "
            "histories, raise the cap, or override get_tokens. Shorter ones will not be named"
        )


def divide(plan: ShufflePlan, max_tokens: int) -> ShufflePlan:
    """Returns the plan with the rows of every rank divided into micro-batches of at most `max_tokens`."""
    rows = plan.rows
    work, tokens, cap = check_samples(rows.workloads, rows.tokens, max_tokens)
    micro_batch, count = number_micro_batches(work, tokens, cap, plan.destination, plan.num_ranks)
    columns = {**rows.columns, MICRO_BATCH: micro_batch}
    return replace(plan, rows=replace(rows, columns=columns), num_parts=count)
