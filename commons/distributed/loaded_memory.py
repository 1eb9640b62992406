"""Notices a loader that fills a batch's memory again before the batch was copied to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..sequence_batch.leaf_fields import Leaf, tensors_of
from ..sequence_batch.rows import Rows

_SAMPLED = 64  # elements of each tensor, evenly spread


class _Noted(NamedTuple):
    """A batch as it was loaded."""

    rows: Rows
    contents: dict[str, bytes]  # some bytes of each host tensor, by its name
    places: frozenset[int]  # addresses of these tensors
    containers: frozenset[int]  # of what holds tensors and may be given others


class LoadedMemory:
    """Compares batches as they were loaded with what their memory holds before they are handed out.

    Planning ahead takes the next batches from the loader before this one is copied to the device. A loader
    that fills the same memory again would train on the wrong data without an error. A loader that gives the
    same unchanged batch again is fine.

    Looks at 64 elements of each host tensor, when a batch is loaded and once more before it is handed out:
    about 5 µs per tensor, twice per step. A change of other elements alone goes unnoticed.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Noted] = deque()

    def loaded(self, rows: Rows) -> None:
        """Notes the rows of a batch from the loader, and checks those that wait to be handed out.

        Raises:
            ValueError: one of them changed since it was loaded.
        """
        newest = self._noted(rows)
        for number, earlier in enumerate(self._waiting):
            is_again = bool(earlier.containers & newest.containers)
            if number == 0 or is_again or earlier.places & newest.places:
                _check(earlier, rows.view(earlier.rows.batch) if is_again else earlier.rows)
        self._waiting.append(newest)

    def handed_out(self) -> None:
        """Forgets the oldest batch, which is copied now."""
        if self._waiting:
            self._waiting.popleft()

    def forget(self) -> None:
        """Forgets all batches."""
        self._waiting.clear()

    def _noted(self, rows: Rows) -> _Noted:
        tensors = dict(_host_tensors(rows))
        places = frozenset(tensor.data_ptr() for tensor in tensors.values() if tensor.numel())
        containers = frozenset(
            id(part.value)
            for part in rows.tree.each()
            if not isinstance(part.value, tuple)
            and any(isinstance(of.value, Leaf) for of in part.parts.values())
        )
        contents = {name: _sample_of(tensor) for name, tensor in tensors.items()}
        return _Noted(rows, contents, places, containers)


def _check(noted: _Noted, rows: Rows) -> None:
    """Compares a batch as it was loaded with its rows now."""
    now = dict(_host_tensors(rows))
    for name, contents in noted.contents.items():
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
    elements = tensor.reshape(-1, 1).view(torch.uint8).numpy()
    return elements[:: max(len(elements) // _SAMPLED, 1)].tobytes() + elements[-1:].tobytes()
