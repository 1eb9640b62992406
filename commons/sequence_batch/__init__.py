"""Batches of sequences, and row selection on their jagged fields."""

from commons.sequence_batch.base_batch import BaseBatch

__all__ = ["BaseBatch"]
