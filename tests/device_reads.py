"""Finds what would make the host wait for a GPU, in code that runs on a CPU."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

REPOSITORY = Path(__file__).parents[1]
# Each turns values of a tensor into something on the host.
_METHODS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")
}
# The size of their result is a value of their argument.
_SIZED_BY_VALUES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}


class DeviceReads(TorchFunctionMode):
    """While active, records where values of tensors are read on the host, or decide a tensor's size.

    On CUDA each synchronizes host and device.

    Attributes:
        places: "file function" of each, the innermost in this repository.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._operators = _SizedByValues(self._record)

    def __enter__(self) -> DeviceReads:
        super().__enter__()
        self._operators.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._operators.__exit__(*error)
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        if function in _METHODS:
            self._record()
        return function(*args, **(kwargs or {}))

    def _record(self) -> None:
        of_repository = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(REPOSITORY)) and "/.venv/" not in frame.filename
        ]
        frame = next(frame for frame in reversed(of_repository) if frame.filename != __file__)
        self.places.append(f"{Path(frame.filename).relative_to(REPOSITORY)} {frame.name}")


class _SizedByValues(TorchDispatchMode):
    def __init__(self, record: Any) -> None:
        super().__init__()
        self._record_read = record

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _SIZED_BY_VALUES or masks or repeats:
            self._record_read()
        return function(*args, **kwargs)
