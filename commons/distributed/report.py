"""A report on the balance of a step, and on the cost of its exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..partition import lower_bound
from ..partition.imbalance import relative_to_mean
from .plan import ShufflePlan

# The unit of workloads if the shuffler does not name one.
WORKLOAD_UNITS = "workload units"


@dataclass(frozen=True, repr=False)
class BalanceReport:
    """Balance of one step before and after the shuffle. `str` summarizes it in one line.

    Arrays of `[ranks]` cover the ranks that plan together. Attributes with `job_` cover all ranks of a
    pipeline's job: an imbalance of 1.01 within each replica may hide 1.4 between replicas.

    Attributes:
        loads_before, loads_after: float64 `[ranks]`, cost of each rank's samples, in `unit`.
        job_loads_before, job_loads_after: loads of all ranks of the job, float64. If ranks exchange in sets,
            these loads use the shuffler's cost, because each set may learn a cost of its own.
        tokens_before, tokens_after: int64 `[ranks]`, tokens of each rank. Activation memory grows with them.
        counts_after: float64 `[ranks, 2 + columns]`, sums of samples, tokens, and `get_workloads` columns.
        samples_moved: number of samples that left their home, whole or in pieces.
        bytes_moved: bytes of the samples that moved.
        bytes_loaded: bytes of all samples.
        workloads: int64 `[samples]`, cost of each whole sample of the step.
        unit: unit of the loads: the shuffler's unit, or "predicted ns" if a cost predicts times.
        equal_rows: whether the lower bound assumes equal rows.
        bytes_sent, bytes_received: bytes that this rank sent and received in the exchange.
        load_seconds: time that this rank waited for its loader, for the batch of a later step.
        plan_wait_seconds: time that this rank waited for the plan.
        exchange_seconds: host time of the exchange. On CUDA, the device may still be working afterwards.
        speeds: float64 `[ranks]`, relative speed of each rank. None means that all are equally fast.
        predicted_seconds: float64 `[ranks]`, compute time by a cost fitted to times. None without one.
        least_load: largest load of the best placement, if an extension knows it, as for padded loads.
        job_total_load: sum of the workloads of all ranks of the job. None means that of their loads.
        extensions: figures that extensions report about the step, by name.
    """

    loads_before: np.ndarray
    loads_after: np.ndarray
    job_loads_before: np.ndarray
    job_loads_after: np.ndarray
    tokens_before: np.ndarray
    tokens_after: np.ndarray
    counts_after: np.ndarray
    samples_moved: int
    bytes_moved: int
    bytes_loaded: int
    workloads: np.ndarray
    unit: str
    equal_rows: bool
    bytes_sent: int = 0
    bytes_received: int = 0
    load_seconds: float = 0.0
    plan_wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    speeds: np.ndarray | None = None
    predicted_seconds: np.ndarray | None = None
    least_load: float | None = None
    job_total_load: float | None = None
    extensions: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(plan: ShufflePlan, equal_rows: bool, unit: str = WORKLOAD_UNITS, **measured: Any) -> BalanceReport:
        """Returns the report of a plan. `unit` is the shuffler's, and `measured` sets further attributes."""
        rows = plan.rows
        moved, starts = rows.home != plan.destination, np.flatnonzero(rows.starts_sample)
        return BalanceReport(
            loads_before=plan.loads_before,
            loads_after=plan.loads,
            job_loads_before=plan.whole.loads_before,
            job_loads_after=plan.whole.loads,
            tokens_before=np.bincount(rows.home, rows.tokens, plan.num_ranks).astype(np.int64),
            tokens_after=plan.counts[:, 1].astype(np.int64),
            counts_after=plan.counts,
            samples_moved=int(np.logical_or.reduceat(moved, starts).sum()),
            bytes_moved=int(rows.sample_bytes[moved].sum()),
            bytes_loaded=int(rows.sample_bytes.sum()),
            workloads=np.add.reduceat(rows.workloads, starts),
            unit=unit if plan.predicted_seconds is None else "predicted ns",
            equal_rows=equal_rows,
            speeds=rows.speeds,
            predicted_seconds=plan.predicted_seconds,
            job_total_load=plan.whole.total_load,
            least_load=None if plan.rank_loads is None else plan.rank_loads.least,
            **measured,
        )

    def __str__(self) -> str:
        moved = self.bytes_moved
        text = (
            f"imbalance {self.imbalance_before:.2f} -> {self.imbalance_after:.2f} in {self.unit} (bound "
            f"{self.lower_bound:.2f}), tokens {self.token_imbalance_before:.2f} -> "
            f"{self.token_imbalance_after:.2f}, {self.samples_moved} of {len(self.workloads)} samples moved "
            f"({f'{moved / 1e3:.0f} kB' if moved < 1e6 else f'{moved / 1e6:.1f} MB'})"
        )
        num_ranks, of_job = len(self.loads_after), len(self.job_loads_after)
        if num_ranks < of_job:
            text += (
                f" among {num_ranks} ranks, imbalance {self.job_imbalance_before:.2f} -> "
                f"{self.job_imbalance_after:.2f} of all {of_job}"
            )
        for name, value in self.extensions.items():
            if isinstance(value, int) and value:
                text += f", {value} {name.replace('_', ' ')}"
        if self.plan_wait_seconds or self.exchange_seconds:  # only pipelines measure them
            text += (
                f", waited {self.plan_wait_seconds * 1e3:.1f} ms for the plan, exchange "
                f"{self.exchange_seconds * 1e3:.1f} ms"
            )
        return text

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    @cached_property
    def lower_bound(self) -> float:
        """The imbalance that no placement of the step's whole samples on these ranks can beat."""
        if self.least_load is not None:
            return relative_to_mean(np.full(len(self.loads_after), self.least_load), total=self._total)
        return lower_bound(
            self.workloads, len(self.loads_after), equal_size=self.equal_rows, speeds=self.speeds
        )

    @property
    def imbalance_before(self) -> float:
        """Largest load as loaded ÷ mean workload of ranks. If speeds differ, longest time ÷ perfect time."""
        return relative_to_mean(self.loads_before, self.speeds, self._total)

    @property
    def imbalance_after(self) -> float:
        """Largest load as placed ÷ mean workload of ranks. If speeds differ, longest time ÷ perfect time."""
        return relative_to_mean(self.loads_after, self.speeds, self._total)

    @property
    def job_imbalance_before(self) -> float:
        """`imbalance_before`, but over all ranks of the job."""
        return relative_to_mean(self.job_loads_before, self._speeds_of_job, self.job_total_load)

    @property
    def job_imbalance_after(self) -> float:
        """`imbalance_after`, but over all ranks of the job."""
        return relative_to_mean(self.job_loads_after, self._speeds_of_job, self.job_total_load)

    @property
    def _total(self) -> float:
        return float(self.workloads.sum(dtype=np.float64))

    @property
    def _speeds_of_job(self) -> np.ndarray | None:
        """Speeds of all ranks of the job. None if the plan knows only those of a set."""
        return self.speeds if len(self.loads_after) == len(self.job_loads_after) else None

    @property
    def token_imbalance_before(self) -> float:
        """Tokens of the fullest rank ÷ mean tokens, as loaded."""
        return relative_to_mean(self.tokens_before)

    @property
    def token_imbalance_after(self) -> float:
        """Tokens of the fullest rank ÷ mean tokens, as balanced. Ignores speeds."""
        return relative_to_mean(self.tokens_after)
