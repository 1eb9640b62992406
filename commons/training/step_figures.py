"""The figures of some steps, from what all ranks know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commons.distributed import BalanceReport

# A training step computes the forward pass once and, in backward, two products of the same size for each.
TRAINING_FLOPS_PER_FORWARD = 3
# Columns of `RanksInterval.sums`.
FIGURES_PER_RANK = 10


@dataclass(frozen=True)
class RanksInterval:
    """What all ranks know of the steps of an interval.

    Attributes:
        seconds: that they took.
        loss_tokens: of all ranks and steps.
        reports: of each step, as one rank has them.
        sums: float64 `[ranks, 10]`: each rank's loss, loaded samples and forward FLOPs, bytes sent and
            received, seconds of waiting for plans and of exchanging, all summed over the steps; its peak
            memory in bytes; computed samples, and their squared numbers of tokens, summed too.
        compute_seconds: float64 `[ranks, steps]`, of the dense part; zeros where it was not measured.
    """

    seconds: float
    loss_tokens: int
    reports: Sequence[BalanceReport]
    sums: np.ndarray
    compute_seconds: np.ndarray

    def figures(self, peak_flops: float | None) -> dict[str, Any]:
        """By name; lists have an entry per rank. `peak_flops` is what one device does in a second at best.

        `imbalance_*` is the largest load ÷ the mean one, as loaded, as planned, and as measured in compute
        time: what the last has above the one before, the costs did not foresee. A rank's `waiting_ms` is by
        how much the slowest rank's compute time exceeded its own, and `other_ms` what a step took beside the
        slowest rank's computing: lookups, communication, optimiser, input, saving.
        """
        loss_sum, samples, forward_flops = self.sums[:, :3].sum(0).tolist()
        num_ranks, num_steps = self.compute_seconds.shape
        sent, received, plan_wait, exchange = (self.sums[:, 3:7].mean(0) / num_steps).tolist()
        flops_per_second = TRAINING_FLOPS_PER_FORWARD * forward_flops / self.seconds
        slowest = self.compute_seconds.max(0)
        figures = {
            "loss": loss_sum / max(self.loss_tokens, 1),
            "seconds_per_step": self.seconds / num_steps,
            "samples_per_second": samples / self.seconds,
            "tokens_per_second": sum(int(report.tokens_before.sum()) for report in self.reports)
            / self.seconds,
            "tflops": flops_per_second / 1e12,
            "imbalance_before": _imbalance([report.loads_before for report in self.reports]),
            "imbalance_after": _imbalance([report.loads_after for report in self.reports]),
            "imbalance_measured": _imbalance(list(self.compute_seconds.T)),
            "micro_batches": sum(report.num_micro_batches for report in self.reports) / num_steps,
            "plan_wait_ms": plan_wait * 1e3,
            "exchange_ms": exchange * 1e3,
            "other_ms": (self.seconds - slowest.sum()) / num_steps * 1e3,
            "bytes_sent": sent,
            "bytes_received": received,
            "compute_ms": _rounded(self.compute_seconds.mean(1) * 1e3),
            "waiting_ms": _rounded((slowest - self.compute_seconds).mean(1) * 1e3),
            "tokens_before": _rounded(np.mean([report.tokens_before for report in self.reports], 0)),
            "tokens_after": _rounded(np.mean([report.tokens_after for report in self.reports], 0)),
            "loads_after": _rounded(np.mean([report.loads_after for report in self.reports], 0)),
            "samples_after": _rounded(self.sums[:, 8] / num_steps),
            "squared_tokens_after": _rounded(self.sums[:, 9] / num_steps),
            "peak_memory_mb": _rounded(self.sums[:, 7] / 1e6),
        }
        if peak_flops is not None:
            figures["mfu"] = flops_per_second / (num_ranks * peak_flops)
        return figures


def text_of(step: int, figures: dict[str, Any]) -> str:
    """A line about figures of `RanksInterval`."""
    divided, sent = figures["micro_batches"], figures["bytes_sent"]
    utilisation = f" ({figures['mfu']:.1%} MFU)" if "mfu" in figures else ""
    text = (
        f"step {step}  loss {figures['loss']:.4f}  {figures['samples_per_second']:.0f} samples/s  "
        f"{figures['tokens_per_second']:.0f} tokens/s  {figures['tflops']:.3g} TFLOP/s{utilisation}  "
        f"imbalance {figures['imbalance_before']:.3f} → {figures['imbalance_after']:.3f}, "
        f"measured {figures['imbalance_measured']:.3f}"
    )
    if divided > 1:
        text += f"  {divided:.3g} micro-batches"
    if sent:
        waited, moved = figures["plan_wait_ms"], figures["exchange_ms"]
        text += f"  plan {waited:.1f} ms, exchange {moved:.1f} ms, {sent / 1e3:.0f} kB sent"
    return text


def _imbalance(loads: Sequence[np.ndarray]) -> float:
    """Largest ÷ mean load of several steps: the largest of each add up, as time does."""
    mean = sum(of_step.mean() for of_step in loads)
    return float(sum(of_step.max() for of_step in loads) / mean) if mean else 1.0


def _rounded(values: np.ndarray) -> list[float]:
    """For a file of JSON lines: a thousandth more or less says nothing."""
    return np.round(values, 3).tolist()
