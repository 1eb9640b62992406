"""Counts, on the host, everything that planning needs to know about the rows of one rank's batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..sequence_batch.fields import FieldValue, Schema, flattened, parts_of
from ..sequence_batch.packed_rows import read_lengths
from ..sequence_batch.rows import NARROW_INTEGERS, Rows
from .extension import Extension
from .plan import Format

_SAMPLED = 64  # least number of evenly spread elements to compare in a large tensor


class LoadedBatch:
    """The rows of a loaded batch, with a record of their contents that reveals later changes.

    Planning ahead loads the next batch before this one is copied to the device. If the loader reuses this
    batch's memory for the next one, training would silently use the wrong data. The record holds at most 127
    elements of each host tensor, or nothing if the batch is not `watched`.
    """

    def __init__(self, rows: Rows, watched: bool = True) -> None:
        self.rows, self.on_host = rows, rows.on_host()
        self._contents = _contents(rows) if watched else {}

    def check_unchanged(self) -> None:
        """Raises a ValueError if the batch has changed since it was loaded."""
        # A loader may put other tensors into the batch, so its tensors are looked up again.
        now = _contents(self.rows.view(self.rows.batch)) if self._contents else {}
        for name, contents in self._contents.items():
            if now.get(name) != contents:
                raise ValueError(
                    f"{name} of a batch changed after the loader gave it, while it waited to be copied: "
                    "yield new tensors for every batch, such as clones. If get_workloads computes in place, "
                    "have it work on a clone"
                )


def _contents(rows: Rows) -> dict[str, bytes]:
    """Returns the bytes of some elements of each host tensor, by its path."""
    found = {}
    for path, leaf in rows.fields.items():
        for part, tensor in parts_of(leaf).items():
            if tensor.device.type == "cpu":
                found[path if tensor is leaf else f"{path}.{part}()"] = _sample_of(tensor)
    return found


def _sample_of(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of fewer than 2 × `_SAMPLED` elements, including the first and the last."""
    if not tensor.is_contiguous():
        evenly = torch.linspace(0, tensor.numel() - 1, _SAMPLED, device="cpu", dtype=torch.float64).long()
        tensor = tensor[torch.unravel_index(evenly, tensor.shape)]
    elements = flattened(tensor)[:, None].view(torch.uint8)
    # `cat` makes a copy for NumPy: torch never resizes memory that NumPy has seen.
    return torch.cat([elements[:: max(len(elements) // _SAMPLED, 1)], elements[-1:]]).numpy().tobytes()


Counter = Callable[[Rows], Any]


def of_batch(count: Callable[[Any], Any]) -> Counter:
    """Wraps a function of a batch into a function of the batch's rows."""
    return lambda rows: count(rows.batch)


class Counted(NamedTuple):
    """The numbers by which a rank tells others of its batch, beside its number of rows.

    Attributes:
        batch: the rows of the batch.
        format: the format of the batch and of `numbers`.
        numbers: the numbers of the real rows, `[samples]` of dtype `format.row(is_wide=True)`.
        padding_lengths: the summed lengths of the padding rows, int64 `[keys]`.
    """

    batch: Rows
    format: Format
    numbers: np.ndarray
    padding_lengths: np.ndarray

    @property
    def is_wide(self) -> bool:
        """Whether tokens, or whole loss tokens, do not fit into 4 bytes."""
        whole = ("tokens", "loss_tokens")[: 2 if self.format.loss_dtype == "int64" else 1]
        return any(self.numbers[name].max(initial=0) >= 2**31 for name in whole)


def count_rows(batch: Rows, counters: Mapping[str, Counter], extensions: Sequence[Extension]) -> Counted:
    """Counts the real rows of a batch on the host.

    Args:
        batch: this rank's rows.
        counters: functions that count the workloads, tokens, and loss tokens of each row, in this order. The
            keys are their names in messages. The functions see int64 lengths.
        extensions: extensions that may have columns.

    Raises:
        ValueError: the batch has no rows, a count is invalid (see `check_numbers`), lengths do not match the
            values, a field requires a gradient, or a column has a wrong shape or dtype, or a name in use.
    """
    _check_detached(batch.fields)
    schema, num_rows, num_real = batch.schema, batch.num_rows, batch.num_samples
    if num_rows == 0:
        raise ValueError("a batch has no rows: skip it in the loader; ranks may have fewer batches")
    lengths = read_lengths(batch.fields, schema, num_rows)
    _check_lengths(lengths, schema)
    shown = batch.to_count()
    checks: tuple[Callable[..., torch.Tensor], ...]
    checks = check_work, check_numbers, partial(check_numbers, weights=True)
    work, tokens, loss_tokens = (
        check(_call(count, shown, whose), num_rows, num_real, whose).numpy()
        for check, (whose, count) in zip(checks, counters.items(), strict=True)
    )
    whose, of_rows = f"{type(batch.batch).__name__}.row_counts", {}
    row_counts = _call(of_batch(type(batch.batch).row_counts), shown, whose) if batch.pads else {}
    for name, counts in row_counts.items():
        wide = counts if counts.is_floating_point() else counts.long()
        of_rows[name] = check_numbers(wide, num_rows, num_real, f"{whose}()[{name!r}]").numpy()
    _add_columns(of_rows, extensions, shown, num_rows, num_real)
    names, dtype = (tuple(row_counts), tuple(of_rows)), str(loss_tokens.dtype)
    row_format = Format(schema, work.shape[1], *names, loss_dtype=dtype, pads=batch.pads)
    numbers = np.zeros(num_real, dtype=row_format.row(is_wide=True))
    numbers["work"], numbers["tokens"], numbers["loss_tokens"] = work, tokens, loss_tokens
    numbers["key_lengths"] = lengths[:num_real]
    for column, name in enumerate(of_rows):
        numbers["columns"][:, column] = of_rows[name]
    return Counted(batch, row_format, numbers, lengths[num_real:].sum(0))


def _check_lengths(lengths: np.ndarray, schema: Schema) -> None:
    """Raises a ValueError for lengths, int64 `[rows, keys]`, that are negative or do not fit in an int32."""
    for row, column in np.argwhere((lengths < 0) | (lengths >= 2**31))[:1]:
        name, key = [(field.name, key) for field in schema.jagged_fields for key in field.keys][column]
        raise ValueError(
            f"field {name!r} has a length of {lengths[row, column]} for row {row}"
            f"{f' of key {key!r}' if key else ''}; expected 0 to 2**31 - 1"
        )


def _call(count: Callable[[Rows], Any], shown: Rows, whose: str) -> Any:
    """Returns the result of a counting function, or its error with a note that names it."""
    try:
        return count(shown)
    except StopIteration as error:  # further up, it would look like the end of the data
        raise RuntimeError(f"{whose} raised {error!r}") from error
    except Exception as error:
        error.add_note(f"{whose} raised it, on a batch whose fields are {[*shown.fields]}")
        raise


def _check_detached(fields: Mapping[str, FieldValue]) -> None:
    """Raises a ValueError if a field requires a gradient, which could not flow back through the exchange."""
    for name, value in fields.items():
        if any(tensor.requires_grad for tensor in parts_of(value).values()):
            raise ValueError(
                f"field {name!r} requires a gradient, which does not travel with its samples: detach it in "
                "the loader, and call requires_grad_ after the exchange if the model needs it"
            )


def _add_columns(
    added: dict[str, np.ndarray], extensions: Sequence[Extension], shown: Rows, num_rows: int, num_real: int
) -> None:
    """Adds the extensions' columns of real rows by name; checks that each can be gathered."""
    for extension in extensions:
        columns = _call(of_batch(extension.columns), shown, f"{extension.name}.columns")
        for name, column in columns.items():
            whose = f"{extension.name}.columns()[{name!r}]"
            if column.dtype != torch.int64 or column.shape != (num_rows,):
                found = f"{column.dtype} of {tuple(column.shape)}"
                raise ValueError(f"{whose} is {found}; expected torch.int64, one per row: ({num_rows},)")
            if name in added:
                raise ValueError(f"{whose}: there is another column of this name")
            added[name] = column[:num_real].numpy()


def check_work(returned: Any, num_rows: int, num_real: int, whose: str) -> torch.Tensor:
    """Returns a user's workloads as int64 `[samples, columns]`. `check_numbers` checks each column."""
    is_matrix = isinstance(returned, torch.Tensor | np.ndarray) and returned.ndim == 2 and returned.shape[1]
    columns = [returned[:, column] for column in range(returned.shape[1])] if is_matrix else [returned]
    return torch.stack([check_numbers(column, num_rows, num_real, whose) for column in columns], 1)


def check_numbers(
    returned: Any, num_rows: int, num_real: int, whose: str, weights: bool = False
) -> torch.Tensor:
    """Returns a copy of a user's numbers of the first `num_real` rows, int64 `[samples]`.

    With `weights`, floats become float64, and need not be integers.

    Raises:
        ValueError: there is not one integer from 0 to 2**63 - 1 per row, or with `weights`, one finite
            non-negative number. The message calls the numbers `whose`.
    """
    real = _values_of_rows(returned, num_rows, whose)[:num_real]
    weights = weights and real.is_floating_point()
    fits = real >= 0
    if weights:
        fits &= real.isfinite()
    elif real.is_floating_point():  # NaN is not equal to itself
        fits &= (real == real.round()) & (real < 2.0**63)
    for row in torch.nonzero(~fits)[:1, 0].tolist():
        expected = "an integer from 0 to 2**63 - 1: round fractions, scaled up; compute products in int64"
        expected = "a finite number from 0" if weights else expected
        raise ValueError(f"{whose} returned {real[row].item()} for row {row}, expected {expected}")
    return real.to(torch.float64 if weights else torch.int64, copy=True)


def _values_of_rows(returned: Any, num_rows: int, whose: str) -> torch.Tensor:
    """Returns a user's numbers as `[rows]`, after refusing wrong shapes, and dtypes that round or wrap."""
    try:
        if isinstance(returned, list | tuple):  # torch would round floats to 32 bits
            returned = np.asarray(returned)
        values = torch.as_tensor(returned, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(returned).__name__
        raise ValueError(f"{whose} returned {kind}, expected integers that torch takes: {error}") from error
    if values.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"{whose} returned {values.dtype}, in which counts above 256, or 2,048, are rounded: add up in "
            "float32 or int64, as in mask.sum(1)"
        )
    if values.is_complex() or values.dtype == torch.uint64:
        raise ValueError(f"{whose} returned {values.dtype}, expected integers")
    if values.dtype in NARROW_INTEGERS:
        raise ValueError(
            f"{whose} returned {values.dtype}, in which squares and FLOPs overflow silently; compute in "
            "int64, as in tokens.long() ** 2"
        )
    if values.shape != (num_rows,):
        has_all_keys = values.dim() == 1 and num_rows and len(values) % num_rows == 0
        raise ValueError(
            f"{whose} returned shape {tuple(values.shape)}, expected one number per row: ({num_rows},)"
            + ("; lengths() of a KeyedJaggedTensor has all keys, one after the other" if has_all_keys else "")
        )
    return values
