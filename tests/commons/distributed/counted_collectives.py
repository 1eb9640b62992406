"""Records collectives, and finds what makes the host wait for the device."""

import dataclasses
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from commons.sequence_batch import BaseBatch
from tests.commons.distributed.internals import Channel

_COMMUNICATES = re.compile(
    "gather|reduce|scatter|broadcast|send|recv|all_to_all|barrier|new_group|new_subgroups|split_group"
)


@contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Records every call that communicates: its name, and its arguments by name.

    Calls of torch.distributed, and those of channels, which stand for the messages in them.
    """
    calls = []
    within = threading.local()

    def gather(channel, row):
        calls.append(("all_gather", {"group": channel}))
        within.a_channel = True
        try:
            return all_gather(channel, row)
        finally:
            within.a_channel = False

    all_gather = Channel.all_gather

    def recorded(name, function):
        signature = inspect.signature(function)

        def call(*args, **kwargs):
            if not getattr(within, "a_channel", False):
                calls.append((name, signature.bind(*args, **kwargs).arguments))
            return function(*args, **kwargs)

        return call

    functions = {
        name: recorded(name, function)
        for name, function in vars(dist).items()
        if _COMMUNICATES.search(name) and not name.startswith("_") and inspect.isfunction(function)
    }
    with mock.patch.multiple(dist, **functions), mock.patch.object(Channel, "all_gather", gather):
        yield calls


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Fails on everything that, on CUDA, would make the host wait for the device."""

    def fail(what: str) -> None:
        raise AssertionError(f"{what} waits for the device")

    with _SynchronizingOps(fail), _SynchronizingCalls(fail):
        yield


def wrong_counts_on_host(batch: BaseBatch) -> list[str]:
    """Returns the row counts that the host knows without waiting, and that are not those of the batch."""
    with no_synchronization():
        on_host, totals = batch.row_counts_on_host(), batch.features.length_per_key()
    counts = dataclasses.replace(batch).row_counts_on_host()  # read anew
    assert counts.keys() == on_host.keys()
    wrong = [name for name in counts if on_host[name].tolist() != counts[name].tolist()]
    of_keys = batch.features.lengths().view(len(totals), -1)
    return wrong if totals == of_keys.sum(1).tolist() else [*wrong, "totals"]


class _SynchronizingOps(TorchDispatchMode):
    """Finds operations whose result has a size, or is a number, that only the device knows."""

    NAMES = (
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "_unique",
    )

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        bad = name == "item" or any(name.startswith(prefix) for prefix in self.NAMES)
        if name == "repeat_interleave":
            bad = kwargs.get("output_size") is None
        elif name in ("index", "index_put", "index_put_"):
            bad = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if bad:
            self._found(str(func))
        return func(*args, **kwargs)


class _SynchronizingCalls(TorchFunctionMode):
    """Finds functions that read a tensor on the host, or copy to the device from pageable memory."""

    NAMES = ("__array__", "__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist")

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Reading or copying a tensor without elements does not wait.
        bad = name in self.NAMES and isinstance(args[0], torch.Tensor) and args[0].numel() > 0
        bad |= func in (torch.tensor, torch.as_tensor)
        if func is torch.Tensor.to:
            target = kwargs.get("device", args[1] if len(args) > 1 else None)
            bad = isinstance(target, torch.device | str) and not kwargs.get("non_blocking", False)
        if bad:
            self._found(name)
        return func(*args, **kwargs)
