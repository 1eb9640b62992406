"""Who should compute what: pure host functions on numbers, deterministic on every machine."""

from commons.partition.balance import imbalance, loads, lower_bound
from commons.partition.karmarkar_karp import karmarkar_karp

__all__ = ["imbalance", "karmarkar_karp", "loads", "lower_bound"]
