"""What a plan does to the loads, and what carrying it out cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.distributed.shuffle_plan import ShufflePlan
from commons.partition import lower_bound
from commons.partition.balance import relative_to_mean


@dataclass(frozen=True)
class BalanceReport:
    """Balance of one step, before and after the shuffle.

    Attributes:
        loads_before, loads_after: float64 `[ranks]`, sums of workloads.
        tokens_before, tokens_after: int64 `[ranks]`.
        lower_bound: the imbalance that no placement of whole samples beats.
        samples_moved: samples that left the rank they were loaded on.
        bytes_moved: bytes of those samples.
        bytes_loaded: bytes of all samples.
        plan_seconds: time that planning kept this rank from training.
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
    plan_seconds: float = 0.0
    exchange_seconds: float = 0.0

    @staticmethod
    def of(
        plan: ShufflePlan, equal_rows: bool, plan_seconds: float = 0.0, exchange_seconds: float = 0.0
    ) -> BalanceReport:
        """The report of one plan."""

        def per_rank(amounts: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
            return np.bincount(rank_of, weights=amounts, minlength=plan.num_ranks)

        moved = plan.home != plan.destination
        return BalanceReport(
            loads_before=per_rank(plan.workloads, plan.home),
            loads_after=per_rank(plan.workloads, plan.destination),
            tokens_before=per_rank(plan.tokens, plan.home).astype(np.int64),
            tokens_after=per_rank(plan.tokens, plan.destination).astype(np.int64),
            lower_bound=lower_bound(plan.workloads, plan.num_ranks, equal_size=equal_rows),
            samples_moved=int(moved.sum()),
            bytes_moved=int(plan.sample_bytes[moved].sum()),
            bytes_loaded=int(plan.sample_bytes.sum()),
            plan_seconds=plan_seconds,
            exchange_seconds=exchange_seconds,
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
    def coefficient_of_variation(self) -> float:
        """Standard deviation ÷ mean of the balanced loads."""
        mean = self.loads_after.mean()
        return float(self.loads_after.std() / mean) if mean > 0 else 0.0
