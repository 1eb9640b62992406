from __future__ import annotations

import numpy as np
import pytest

from commons.distributed import BalanceReport
from commons.training.step_figures import RanksInterval, text_of


def _report(before: list[float], after: list[float]) -> BalanceReport:
    return BalanceReport(
        loads_before=np.array(before),
        loads_after=np.array(after),
        tokens_before=np.array(before, dtype=np.int64) // 10,
        tokens_after=np.array(after, dtype=np.int64) // 10,
        lower_bound=1.0,
        samples_moved=1,
        bytes_moved=10,
        bytes_loaded=100,
    )


RANKS = RanksInterval(
    seconds=4.0,
    loss_tokens=200,
    reports=[_report([100, 300], [200, 200]), _report([500, 100], [300, 300])],
    sums=np.array(
        [[60.0, 8, 1e12, 10, 30, 0.2, 0.4, 5e6, 7, 50], [40.0, 4, 3e12, 30, 10, 0.6, 0.0, 7e6, 5, 90]]
    ),
    compute_seconds=np.array([[0.5, 1.0], [1.5, 0.8]]),
)


def test_figures_add_up_over_ranks_and_steps():
    figures = RANKS.figures(peak_flops=3e12)
    expected = {
        "loss": 0.5,
        "seconds_per_step": 2.0,
        "samples_per_second": 3.0,
        "tokens_per_second": (40 + 60) / 4,
        "tflops": 3 * 4 / 4,  # a forward and two backwards
        "mfu": 3e12 / (2 * 3e12),
        "imbalance_before": (300 + 500) / (200 + 300),
        "imbalance_after": 1.0,
        "imbalance_measured": (1.5 + 1.0) / (1.0 + 0.9),
        "plan_wait_ms": 200.0,
        "exchange_ms": 100.0,
        "other_ms": 1e3 * (4 - 2.5) / 2,
        "bytes_sent": 10.0,
        "compute_ms": [750.0, 1150.0],
        "waiting_ms": [500.0, 100.0],
        "tokens_before": [30.0, 20.0],
        "tokens_after": [25.0, 25.0],
        "loads_after": [250.0, 250.0],
        "samples_after": [3.5, 2.5],
        "squared_tokens_after": [25.0, 45.0],
        "peak_memory_mb": [5.0, 7.0],
    }
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value), name
    # A step of a rank is its computing, its waiting for the slowest, and the rest.
    for compute, waiting in zip(figures["compute_ms"], figures["waiting_ms"], strict=True):
        assert compute + waiting + figures["other_ms"] == pytest.approx(1e3 * figures["seconds_per_step"])


def test_the_line_has_utilisation_only_where_the_peak_is_known():
    assert "3 TFLOP/s (50.0% MFU)" in text_of(7, RANKS.figures(peak_flops=3e12))
    line = text_of(7, RANKS.figures(peak_flops=None))
    assert "MFU" not in line and "imbalance 1.600 → 1.000, measured 1.316" in line
