"""Who should compute what: pure host functions on numbers, deterministic on every machine."""

from commons.partition.balance import imbalance, loads, lower_bound
from commons.partition.karmarkar_karp import karmarkar_karp
from commons.partition.rebalance import rebalance
from commons.partition.refine import longest_processing_time, refine, refined
from commons.partition.window import balance_window, step_ratios

__all__ = [
    "balance_window",
    "imbalance",
    "karmarkar_karp",
    "loads",
    "longest_processing_time",
    "lower_bound",
    "rebalance",
    "refine",
    "refined",
    "step_ratios",
]
