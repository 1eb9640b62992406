"""Names that `commons.sequence_batch` does not export: the one place where tests know its files."""

from commons.sequence_batch.fields import BUFFER_ALIGNMENT, Field, FieldValue, Schema
from commons.sequence_batch.packed_rows import (
    PackedRows,
    Selection,
    gather_fields,
    read_lengths,
    select_rows,
    to_chunks,
)
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.tree import take_apart
