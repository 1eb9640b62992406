"""Batches, random data, and sequence data from disk."""

from commons.datasets.hstu_batch import HSTUBatch

__all__ = ["HSTUBatch"]
