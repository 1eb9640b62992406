"""Detection of loaders that overwrite a batch's memory before the batch is copied to the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..sequence_batch.row_schema import FieldValue, flattened, parts_of
from ..sequence_batch.rows import Rows

_SAMPLED = 64  # least number of evenly spread elements to compare in a large tensor


class LoadedBatch:
    """The rows of a loaded batch, with a record of their contents that reveals later changes.

    Planning ahead loads the next batch before this one is copied to the device. If the loader reuses this
    batch's memory for the next one, training would silently use the wrong data. A loader may yield the same
    batch again, unchanged.

    The record holds at most 127 elements of each host tensor, or nothing if the batch is not `watched`. A
    change of only the other elements goes unnoticed.
    """

    def __init__(self, rows: Rows, watched: bool = True) -> None:
        self.rows, self.on_host = rows, rows.on_host()
        tensors = _host_tensors(rows) if watched else ()
        self._contents = {name: _sample_of(tensor) for name, tensor in tensors}
        # Mutable objects that hold tensors: a loader may put other tensors into them.
        self._containers = {
            id(part.value)
            for part in rows.tree.each()
            if not isinstance(part.value, tuple)
            and any(isinstance(of.value, FieldValue) for of in part.parts.values())
        }

    def check_unchanged(self, newer: LoadedBatch | None = None) -> None:
        """Raises a ValueError if the batch has changed since it was loaded; `newer` was loaded after it."""
        if not self._contents:
            return
        is_again = newer is not None and not self._containers.isdisjoint(newer._containers)
        now = dict(_host_tensors(self.rows.view(self.rows.batch) if is_again else self.rows))
        for name, contents in self._contents.items():
            if name not in now or _sample_of(now[name]) != contents:
                raise ValueError(
                    f"{name} of a batch changed after the loader gave it, while it waited to be copied: "
                    "yield new tensors for every batch, such as clones. With planning ahead, the memory of a "
                    "batch may be filled again for the second batch after it. If get_workloads computes in "
                    "place, have it work on a clone"
                )


def _host_tensors(rows: Rows) -> Iterator[tuple[str, torch.Tensor]]:
    for name, field in rows.fields.items():
        for part, tensor in parts_of(field).items():
            if tensor.device.type == "cpu":
                yield name if tensor is field else f"{name}.{part}()", tensor


def _sample_of(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of fewer than 2 × `_SAMPLED` elements, including the first and the last."""
    if not tensor.is_contiguous():
        evenly = torch.linspace(0, tensor.numel() - 1, _SAMPLED, device="cpu", dtype=torch.float64).long()
        tensor = tensor[torch.unravel_index(evenly, tensor.shape)]
    elements = flattened(tensor)[:, None].view(torch.uint8)
    # `cat` makes a copy for NumPy: torch never resizes memory that NumPy has seen.
    return torch.cat([elements[:: max(len(elements) // _SAMPLED, 1)], elements[-1:]]).numpy().tobytes()
