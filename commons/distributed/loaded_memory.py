"""Notices a loader that fills a batch's memory again before the batch was copied to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..sequence_batch.batch_view import BatchView
from ..sequence_batch.row_schema import FieldValue

_SAMPLED = 64  # elements of each tensor, evenly spread


class _Noted(NamedTuple):
    """A batch as it was loaded."""

    batch: Any
    contents: dict[str, bytes]  # some bytes of each host tensor, by its name
    places: frozenset[int]  # addresses of these tensors


class LoadedMemory:
    """Compares batches as they were loaded with what their memory holds before they are handed out.

    Planning ahead takes the next batches from the loader before this one is copied to the device. A loader
    that fills the same memory again would train on the wrong data without an error. A loader that gives the
    same unchanged batch again is fine.

    Looks at 64 elements of each host tensor, when a batch is loaded and once more before it is handed out:
    about 5 µs per tensor, twice per step. A change of other elements alone goes unnoticed.
    """

    def __init__(self, view: Callable[[Any], BatchView]) -> None:
        self._view = view
        self._waiting: deque[_Noted] = deque()

    def loaded(self, view: BatchView) -> None:
        """Notes a batch from the loader, by its view, and checks those that wait to be handed out.

        Raises:
            ValueError: one of them changed since it was loaded.
        """
        newest = self._noted(view)
        for number, earlier in enumerate(self._waiting):
            if number == 0 or earlier.batch is view.batch or earlier.places & newest.places:
                self._check(earlier)
        self._waiting.append(newest)

    def handed_out(self) -> None:
        """Forgets the oldest batch, which is copied now."""
        if self._waiting:
            self._waiting.popleft()

    def forget(self) -> None:
        """Forgets all batches."""
        self._waiting.clear()

    def _noted(self, view: BatchView) -> _Noted:
        tensors = dict(_host_tensors(view))
        places = frozenset(tensor.data_ptr() for tensor in tensors.values() if tensor.numel())
        return _Noted(view.batch, {name: _sample_of(tensor) for name, tensor in tensors.items()}, places)

    def _check(self, noted: _Noted) -> None:
        now = dict(_host_tensors(self._view(noted.batch)))
        for name, contents in noted.contents.items():
            if name not in now or _sample_of(now[name]) != contents:
                raise ValueError(
                    f"{name} of a batch changed after the loader gave it, while it waited to be copied: "
                    "yield new tensors for every batch, such as clones. With planning ahead, the memory of a "
                    "batch may be filled again for the second batch after it"
                )


def _host_tensors(view: BatchView) -> Iterator[tuple[str, torch.Tensor]]:
    for name, field in view.fields.items():
        for part, tensor in _parts(field):
            if tensor is not None and tensor.device.type == "cpu":
                yield name + part, tensor


def _parts(field: FieldValue) -> list[tuple[str, torch.Tensor | None]]:
    if isinstance(field, torch.Tensor):
        return [("", field)]
    return [
        (".values()", field.values()),
        (".weights()", field.weights_or_none()),
        (".lengths()", field.lengths_or_none()),
        (".offsets()", field.offsets_or_none()),
    ]


def _sample_of(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of up to about `_SAMPLED` elements, the first and the last among them."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        evenly = torch.linspace(0, tensor.numel() - 1, _SAMPLED, device="cpu", dtype=torch.float64).long()
        tensor = tensor[torch.unravel_index(evenly, tensor.shape)]
    elements = tensor.reshape(-1, 1).view(torch.uint8).numpy()
    return elements[:: max(len(elements) // _SAMPLED, 1)].tobytes() + elements[-1:].tobytes()
