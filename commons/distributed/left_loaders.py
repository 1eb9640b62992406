"""Iterators from which a loop loaded a batch that it did not use, and that the next loop would skip."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

# Iterators of lists do not support weak references, so the last few are kept alive, with their lists.
_KEPT = 4
_left: deque[tuple[Callable[[], Any], int | None]] = deque(maxlen=64)
_kept: deque[Iterator[Any]] = deque(maxlen=_KEPT)


def leave(loader: Iterator[Any]) -> None:
    """Records that a loop, of any shuffler, was left with a loaded batch of this iterator unused."""
    try:
        reference: Callable[[], Any] = weakref.ref(loader)
    except TypeError:
        _kept.append(loader)
        reference = functools.partial(_find_kept, id(loader))
    _left.append((reference, _place(loader)))


def was_left(loader: Iterator[Any]) -> bool:
    """Returns whether an earlier loop left a batch of this iterator unused. Called when a loop begins.

    An iterator whose class defines `__iter__` in Python may start over in that method. Such an iterator,
    except a DataLoader's, counts as left only until a loop over another iterator begins.
    """
    place = _place(loader)
    found = any(reference() is loader and place == left_at for reference, left_at in _left)
    for entry in [*_left]:
        left, left_at = entry[0](), entry[1]
        is_of_class = left_at is None and isinstance(
            getattr(type(left), "__iter__", None), types.FunctionType
        )
        if left is None or (left is not loader and is_of_class):
            _left.remove(entry)
    return found


def _find_kept(key: int) -> Iterator[Any] | None:
    return next((loader for loader in _kept if id(loader) == key), None)


def _place(loader: Iterator[Any]) -> int | None:
    """Returns how many batches a DataLoader's iterator has yielded; None for other iterators. With persistent
    workers, all epochs share one iterator object, whose count starts over at 0."""
    return getattr(loader, "_num_yielded", None)
