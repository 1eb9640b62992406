"""What a plan does to the loads, and what carrying it out cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.distributed.exchange import Traffic
from commons.distributed.shuffle_plan import ShufflePlan, WindowPlan
from commons.partition import lower_bound
from commons.partition.balance import relative_to_mean
from commons.partition.micro_batches import time_relative_to_mean


@dataclass(frozen=True)
class BalanceReport:
    """Balance of one step, before and after the shuffle.

    Attributes:
        loads_before, loads_after: float64 `[ranks]`, sums of workloads. In a window, "before" is the step as
            it would be without: the batches that were loaded at its place.
        tokens_before, tokens_after: int64 `[ranks]`.
        lower_bound: the imbalance that no placement of the step's whole samples beats.
        samples_moved: samples that left the rank they were loaded on.
        bytes_moved: bytes of those samples.
        bytes_loaded: bytes of all samples.
        micro_batch_loads: float64 `[ranks, micro-batches]`, sums of workloads; None where batches run whole.
        step_ratio: the step's total workload ÷ that of the mean step of its window; 1.0 without a window.
        bytes_sent, bytes_received: by this rank in the exchange.
        plan_wait_seconds: time that this rank waited for the plan.
        exchange_seconds: time that the host spent in the exchange; on CUDA the device works on behind it.
    """

    loads_before: np.ndarray
    loads_after: np.ndarray
    tokens_before: np.ndarray
    tokens_after: np.ndarray
    lower_bound: float
    samples_moved: int
    bytes_moved: int
    bytes_loaded: int
    micro_batch_loads: np.ndarray | None = None
    step_ratio: float = 1.0
    bytes_sent: int = 0
    bytes_received: int = 0
    plan_wait_seconds: float = 0.0
    exchange_seconds: float = 0.0

    @staticmethod
    def of(
        plan: ShufflePlan,
        equal_rows: bool,
        traffic: Traffic | None = None,
        window: WindowPlan | None = None,
        step: int = 0,
    ) -> BalanceReport:
        """The report of one plan.

        Args:
            plan: the placement.
            equal_rows: whether the lower bound is that of equal rows.
            traffic: this rank's, as `BatchShuffler.traffic` has it.
            window: what the plan is a part of, if of more than one step.
            step: which one of them.
        """

        def per_rank(amounts: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
            return np.bincount(rank_of, weights=amounts, minlength=plan.num_ranks)

        loads_before, tokens_before = per_rank(plan.workloads, plan.home), per_rank(plan.tokens, plan.home)
        step_ratio = 1.0
        if window is not None and len(window.steps) > 1:
            loads_before = window.loaded_per_rank(window.workloads, step)
            tokens_before = window.loaded_per_rank(window.tokens, step)
            mean = window.workloads.sum(dtype=np.float64) / len(window.steps)
            step_ratio = float(plan.workloads.sum(dtype=np.float64) / mean) if mean else 1.0
        moved = plan.home != plan.destination
        return BalanceReport(
            loads_before=loads_before,
            loads_after=per_rank(plan.workloads, plan.destination),
            tokens_before=tokens_before.astype(np.int64),
            tokens_after=per_rank(plan.tokens, plan.destination).astype(np.int64),
            lower_bound=lower_bound(plan.workloads, plan.num_ranks, equal_size=equal_rows),
            samples_moved=int(moved.sum()),
            bytes_moved=int(plan.sample_bytes[moved].sum()),
            bytes_loaded=int(plan.sample_bytes.sum()),
            micro_batch_loads=_micro_batch_loads(plan),
            step_ratio=step_ratio,
            bytes_sent=0 if traffic is None else traffic.sent,
            bytes_received=0 if traffic is None else traffic.received,
        )

    @property
    def imbalance_before(self) -> float:
        """Largest ÷ mean load, as loaded."""
        return relative_to_mean(self.loads_before)

    @property
    def imbalance_after(self) -> float:
        """Largest ÷ mean load, as balanced."""
        return relative_to_mean(self.loads_after)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that every rank runs; 1 where batches run whole."""
        return 1 if self.micro_batch_loads is None else self.micro_batch_loads.shape[1]

    @property
    def micro_batch_imbalance(self) -> float:
        """Sum over k of the largest k-th micro-batch's load ÷ mean load of a rank: `imbalance_after` where
        ranks wait for each other after every micro-batch."""
        if self.micro_batch_loads is None:
            return self.imbalance_after
        return time_relative_to_mean(self.micro_batch_loads)

    @property
    def coefficient_of_variation(self) -> float:
        """Standard deviation ÷ mean of the balanced loads."""
        mean = self.loads_after.mean()
        return float(self.loads_after.std() / mean) if mean > 0 else 0.0


def _micro_batch_loads(plan: ShufflePlan) -> np.ndarray | None:
    if not plan.micro_batches:
        return None
    return np.array(
        [
            [plan.workloads[placed[rows]].sum(dtype=np.float64) for rows in of_rank]
            for placed, of_rank in zip(plan.partition, plan.micro_batches, strict=True)
        ]
    )
