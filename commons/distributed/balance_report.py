"""The balance of a step, and what the exchange cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..partition import lower_bound
from ..partition.balance import relative_to_mean
from ..partition.micro_batches import time_relative_to_mean
from .exchange import Traffic
from .key_fetch import PlacedPieces
from .shuffle_plan import ShufflePlan

# The unit of costs of which nothing is known.
WORKLOAD_UNITS = "workload units"


@dataclass(frozen=True, repr=False)
class BalanceReport:
    """Balance of one step, before and after the shuffle; `str` tells it in one line.

    Attributes:
        loads_before, loads_after: float64 `[ranks]`, sums of costs, in `unit`.
        tokens_before, tokens_after: int64 `[ranks]`; memory of activations follows them.
        counts_after: float64 `[ranks, 2 + columns]`, samples, tokens, and the columns of `get_workloads`.
        samples_moved: samples that left the rank they were loaded on.
        bytes_moved: bytes of those samples.
        bytes_loaded: bytes of all samples.
        workloads: int64 `[samples]`, costs of the step's whole samples.
        unit: of loads: that of the shuffler's workloads, or nanoseconds that a cost predicts.
        equal_rows: whether the lower bound is that of equal rows.
        micro_batch_loads: float64 `[ranks, micro-batches]`, sums of workloads; None where batches run whole.
        bytes_sent, bytes_received: by this rank in the exchange.
        plan_wait_seconds: time that this rank waited for the plan.
        exchange_seconds: host time of the exchange; on CUDA the device may still be at work.
        samples_cut: samples that were cut into pieces, each of which counts as one in `samples_moved`.
        pieces: pieces of these samples.
        bytes_fetched: keys, values and their gradients that this rank received for pieces.
        fetch_seconds: host time that this rank waited for them.
        speeds: float64 `[ranks]`; None if all ranks are equally fast.
        predicted_seconds: float64 `[ranks]`, compute time by costs that were fitted to times; None without.
    """

    loads_before: np.ndarray
    loads_after: np.ndarray
    tokens_before: np.ndarray
    tokens_after: np.ndarray
    counts_after: np.ndarray
    samples_moved: int
    bytes_moved: int
    bytes_loaded: int
    workloads: np.ndarray
    unit: str
    equal_rows: bool
    micro_batch_loads: np.ndarray | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    plan_wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    samples_cut: int = 0
    pieces: int = 0
    bytes_fetched: int = 0
    fetch_seconds: float = 0.0
    speeds: np.ndarray | None = None
    predicted_seconds: np.ndarray | None = None

    @staticmethod
    def of(
        plan: ShufflePlan,
        equal_rows: bool,
        traffic: Traffic | None = None,
        plan_wait_seconds: float = 0.0,
        exchange_seconds: float = 0.0,
        fetched: PlacedPieces | None = None,
        unit: str = WORKLOAD_UNITS,
    ) -> BalanceReport:
        """Reports on the step of a plan.

        Args:
            plan: the placement of the step.
            equal_rows: whether the lower bound is that of equal rows.
            traffic: this rank's, from `BatchShuffler.traffic`.
            plan_wait_seconds, exchange_seconds: as in the report.
            fetched: this rank's, where samples were cut.
            unit: of the workloads, `BatchShuffler.unit`.
        """

        def per_rank(amounts: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
            return np.bincount(rank_of, weights=amounts, minlength=plan.num_ranks)

        moved = plan.home != plan.destination
        starts = np.flatnonzero(plan.starts_sample)
        pieces_of_each = np.diff(np.append(starts, len(plan.workloads)))
        return BalanceReport(
            loads_before=per_rank(plan.workloads, plan.home),
            loads_after=plan.loads,
            tokens_before=per_rank(plan.tokens, plan.home).astype(np.int64),
            tokens_after=per_rank(plan.tokens, plan.destination).astype(np.int64),
            counts_after=plan.counts,
            samples_moved=int(moved.sum()),
            bytes_moved=int(plan.sample_bytes[moved].sum()),
            bytes_loaded=int(plan.sample_bytes.sum()),
            workloads=np.add.reduceat(plan.workloads, starts) if len(starts) else plan.workloads,
            unit=unit if plan.predicted_seconds is None else "predicted ns",
            equal_rows=equal_rows,
            micro_batch_loads=_micro_batch_loads(plan),
            bytes_sent=0 if traffic is None else traffic.sent,
            bytes_received=0 if traffic is None else traffic.received,
            plan_wait_seconds=plan_wait_seconds,
            exchange_seconds=exchange_seconds,
            samples_cut=int((pieces_of_each > 1).sum()),
            pieces=int(pieces_of_each[pieces_of_each > 1].sum()),
            bytes_fetched=0 if fetched is None else fetched.bytes_fetched,
            fetch_seconds=0.0 if fetched is None else fetched.seconds,
            speeds=plan.speeds,
            predicted_seconds=plan.predicted_seconds,
        )

    def __str__(self) -> str:
        text = (
            f"imbalance {self.imbalance_before:.2f} → {self.imbalance_after:.2f} in {self.unit} (bound "
            f"{self.lower_bound:.2f}), tokens {self.token_imbalance_before:.2f} → "
            f"{self.token_imbalance_after:.2f}, {self.samples_moved} of {len(self.workloads)} samples moved "
            f"({_bytes_text(self.bytes_moved)})"
        )
        if self.samples_cut:
            text += f", {self.samples_cut} cut into {self.pieces} pieces"
        if self.micro_batch_loads is not None:
            text += f", {self.num_micro_batches} micro-batches"
        if self.plan_wait_seconds or self.exchange_seconds:  # known to pipelines alone
            text += (
                f", waited {self.plan_wait_seconds * 1e3:.1f} ms for the plan, exchange "
                f"{self.exchange_seconds * 1e3:.1f} ms"
            )
        return text

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    @cached_property
    def lower_bound(self) -> float:
        """The imbalance that no placement of the step's whole samples on all ranks beats."""
        return lower_bound(
            self.workloads, len(self.loads_after), equal_size=self.equal_rows, speeds=self.speeds
        )

    @property
    def imbalance_before(self) -> float:
        """Largest ÷ mean load, as loaded; of loads ÷ speeds where speeds differ."""
        return relative_to_mean(self.loads_before, self.speeds)

    @property
    def imbalance_after(self) -> float:
        """Largest ÷ mean load, as balanced; of loads ÷ speeds where speeds differ."""
        return relative_to_mean(self.loads_after, self.speeds)

    @property
    def token_imbalance_before(self) -> float:
        """Tokens of the fullest rank ÷ the mean, as loaded."""
        return relative_to_mean(self.tokens_before)

    @property
    def token_imbalance_after(self) -> float:
        """Tokens of the fullest rank ÷ the mean, as balanced; the mean counts all ranks alike."""
        return relative_to_mean(self.tokens_after)

    @property
    def rank_speeds(self) -> np.ndarray:
        """float64 `[ranks]`, speeds that loads were made proportional to; their geometric mean is 1."""
        if self.speeds is None:
            return np.ones(len(self.loads_after))
        return self.speeds / np.exp(np.log(self.speeds).mean())

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that every rank runs; 1 where batches run whole."""
        return 1 if self.micro_batch_loads is None else self.micro_batch_loads.shape[1]

    @property
    def micro_batch_imbalance(self) -> float:
        """Sum over k of the largest k-th micro-batch's load ÷ a rank's mean load.

        It takes the place of `imbalance_after` where ranks wait for each other after every micro-batch. The
        pipelines here wait once per step.
        """
        if self.micro_batch_loads is None:
            return self.imbalance_after
        return time_relative_to_mean(self.micro_batch_loads)


def _bytes_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:.1f} MB"


def _micro_batch_loads(plan: ShufflePlan) -> np.ndarray | None:
    if not plan.in_micro_batches:
        return None
    count = plan.num_micro_batches
    slots = plan.destination * count + plan.micro_batch
    return np.bincount(slots, plan.workloads, minlength=plan.num_ranks * count).reshape(-1, count)
