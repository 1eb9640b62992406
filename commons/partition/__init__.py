"""Which part computes which sample: pure host functions of numbers, on every machine alike.

Ties are broken by index. Nothing depends on the order in which a processor adds.
"""

from typing import TYPE_CHECKING

from ..lazy_names import imported_on_use
from .balance import imbalance, loads, lower_bound
from .rebalance import rebalance
from .refine import karmarkar_karp, longest_processing_time, refine, refined

if TYPE_CHECKING:
    from .micro_batches import (
        balance_micro_batches,
        divide_into_micro_batches,
        micro_batch_imbalance,
        pack_micro_batches,
    )
    from .window import balance_window, step_ratios

__all__ = [
    "balance_micro_batches",
    "balance_window",
    "divide_into_micro_batches",
    "imbalance",
    "karmarkar_karp",
    "loads",
    "longest_processing_time",
    "lower_bound",
    "micro_batch_imbalance",
    "pack_micro_batches",
    "rebalance",
    "refine",
    "refined",
    "step_ratios",
]

__getattr__ = imported_on_use(
    __name__,
    {
        "micro_batches": [
            "balance_micro_batches",
            "divide_into_micro_batches",
            "micro_batch_imbalance",
            "pack_micro_batches",
        ],
        "window": ["balance_window", "step_ratios"],
    },
)
