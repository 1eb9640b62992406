"""Detection of loaders that overwrite a batch's memory before the batch is copied to the device."""

from __future__ import annotations

import torch

from ..sequence_batch.row_schema import flattened, parts_of
from ..sequence_batch.rows import Rows

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
