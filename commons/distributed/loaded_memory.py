"""Notices a loader that fills a batch's memory again before the batch was copied to the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..sequence_batch.leaf_fields import Leaf, tensors_of
from ..sequence_batch.rows import Rows

_SAMPLED = 64  # elements of each tensor, evenly spread


class LoadedBatch:
    """The rows of a batch as they were loaded, to compare with what their memory holds later.

    Planning ahead takes the next batch from the loader before this one is copied to the device. A loader
    that fills the same memory again would train on the wrong data without an error. A loader that gives the
    same unchanged batch again is fine.

    Looks at 64 elements of each host tensor, when a batch is loaded and once more before it is handed out:
    about 5 µs per tensor, twice per step. A change of other elements alone goes unnoticed.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows, self.on_host = rows, rows.on_host()
        self._contents = {name: _sample_of(tensor) for name, tensor in _host_tensors(rows)}
        # Objects that hold tensors and may be given others.
        self._containers = {
            id(part.value)
            for part in rows.tree.each()
            if not isinstance(part.value, tuple)
            and any(isinstance(of.value, Leaf) for of in part.parts.values())
        }

    def check_unchanged(self, newer: LoadedBatch | None = None) -> None:
        """Raises a ValueError if the batch changed since it was loaded, and before the `newer` one was."""
        is_again = newer is not None and not self._containers.isdisjoint(newer._containers)
        now = dict(_host_tensors(self.rows.view(self.rows.batch) if is_again else self.rows))
        for name, contents in self._contents.items():
            if name not in now or _sample_of(now[name]) != contents:
                raise ValueError(
                    f"{name} of a batch changed after the loader gave it, while it waited to be copied: "
                    "yield new tensors for every batch, such as clones. With planning ahead, the memory of a "
                    "batch may be filled again for the second batch after it. If it is get_workloads that "
                    "computes in place, have it do so on a clone"
                )


def _host_tensors(rows: Rows) -> Iterator[tuple[str, torch.Tensor]]:
    for name, field in rows.fields.items():
        for part, tensor in tensors_of(field):
            if tensor.device.type == "cpu":
                yield name + part, tensor


def _sample_of(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of up to about `_SAMPLED` elements, the first and the last among them."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        evenly = torch.linspace(0, tensor.numel() - 1, _SAMPLED, device="cpu", dtype=torch.float64).long()
        tensor = tensor[torch.unravel_index(evenly, tensor.shape)]
    elements = tensor.reshape(-1, 1).view(torch.uint8)
    # Of a copy: once NumPy has seen a tensor's memory, torch never resizes it.
    return torch.cat([elements[:: max(len(elements) // _SAMPLED, 1)], elements[-1:]]).numpy().tobytes()
