"""What planning must know of one rank's samples, read from its batches on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commons.sequence_batch import sample_rows
from commons.sequence_batch.packed_rows import PackedRows, check_jagged_fields, key_lengths, row_elements
from commons.sequence_batch.row_schema import RowSchema

NUM_COUNTS = 3  # of each sample: workload, tokens, loss tokens


@dataclass(frozen=True)
class SampleFacts:
    """One rank's batches of a window, as far as planning needs them.

    Attributes:
        schema: the fields of the batches.
        batch_sizes: int64 `[batches]`, rows, padding included.
        num_loaded: int64 `[batches]`, real rows.
        per_sample: int64 `[samples, NUM_COUNTS + jagged fields]`: workload, tokens, loss tokens, elements of
            each jagged field.
    """

    schema: RowSchema
    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    per_sample: np.ndarray

    @staticmethod
    def of(batches: Sequence[Any], get_workloads: Callable[[Any], torch.Tensor], whose: str) -> SampleFacts:
        """Facts of batches on the host.

        Args:
            batches: at least one.
            get_workloads: what each row costs, `[batch_size]`.
            whose: how messages call it.

        Raises:
            ValueError: workloads of the wrong length, negative, NaN or infinite; a batch's lengths do not
                account for its values; or the batches differ in their fields.
        """
        schema, sizes, per_sample = None, [], []
        for batch in batches:
            fields = sample_rows.per_sample_fields(batch)
            check_jagged_fields(fields)
            of_batch = RowSchema.of(fields)
            schema = schema or of_batch
            if difference := schema.difference(of_batch):
                raise ValueError(
                    f"two batches of this rank differ: {difference}; all must have the same fields"
                )
            num_rows, num_real = sample_rows.batch_rows(batch)
            if num_rows == 0:
                raise ValueError(
                    "a batch of this rank has no rows; a loader that has ended gives no batch at all"
                )
            counts = [
                checked_counts(returned, num_rows, num_real, method)
                for returned, method in (
                    (get_workloads(batch), whose),
                    (sample_rows.num_tokens(batch), f"{type(batch).__name__}.num_tokens"),
                    (sample_rows.num_loss_tokens(batch), f"{type(batch).__name__}.num_loss_tokens"),
                )
            ]
            elements = row_elements(key_lengths(fields, schema, num_rows), schema)
            columns = torch.stack([*counts, *elements.unbind(1)], 1)
            sizes.append((num_rows, num_real))
            per_sample.append(columns[:num_real].numpy())
        if schema is None:
            raise ValueError("there are no batches")
        batch_sizes, num_loaded = np.array(sizes, dtype=np.int64).T
        return SampleFacts(schema, batch_sizes, num_loaded, np.concatenate(per_sample))


def padding_row(batch: Any) -> Any:
    """A host batch like this one, of one padding row."""
    fields = sample_rows.per_sample_fields(batch)
    packed = PackedRows.pack(fields, RowSchema.of(fields), sample_rows.batch_rows(batch)[0])
    nothing = packed.select(np.zeros(0, dtype=np.int64)).pad_to(1)
    return sample_rows.with_rows(batch, nothing.unpack(), 1, 0)


def checked_counts(returned: Any, num_rows: int, num_real: int, whose: str) -> torch.Tensor:
    """int64 `[rows]` from what a user's method returned, 0 for padding rows.

    Raises:
        ValueError: that is no whole number of at least 0 for each row; `whose` is how the message calls it.
    """
    try:
        values = torch.as_tensor(returned).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{whose} returned {type(returned).__name__}, expected integers") from error
    if values.is_complex() or values.dtype == torch.uint64:
        raise ValueError(f"{whose} returned {values.dtype}, expected integers")
    if values.shape != (num_rows,):
        raise ValueError(
            f"{whose} returned shape {tuple(values.shape)}, expected one number per row: ({num_rows},)"
        )
    real = values[:num_real]
    whole = torch.ones_like(real, dtype=torch.bool)
    if real.is_floating_point():  # NaN equals nothing; infinity is too large
        whole = (real == real.round()) & (real < 2.0**63)
    bad = torch.nonzero(~(whole & (real >= 0)))
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"{whose} returned {real[row].item()} for row {row}, "
            "expected an integer of at least 0, below 2**63; scale fractions up and round them"
        )
    checked = torch.zeros(num_rows, dtype=torch.int64)
    checked[:num_real] = real
    return checked
