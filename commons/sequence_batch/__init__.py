"""Batches of sequences, and row selection on their jagged fields."""

from commons.sequence_batch.base_batch import BaseBatch
from commons.sequence_batch.containers import register_batch_type

__all__ = ["BaseBatch", "register_batch_type"]
