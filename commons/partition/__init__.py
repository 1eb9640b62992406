"""Pure host functions that decide which part computes which sample, with identical results on every machine.

Ties are broken by index. No result depends on the order in which a processor adds numbers.
"""

from .imbalance import imbalance, lower_bound
from .karmarkar_karp import karmarkar_karp
from .rebalance import rebalance
from .refined import longest_processing_time, refined

__all__ = ["imbalance", "karmarkar_karp", "longest_processing_time", "lower_bound", "rebalance", "refined"]
