"""Iterators that gave one batch more to a loop than it ran, so that going on with them loses that batch."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

# Iterators of lists have no weak references. A few are kept, with what they hold.
_KEPT = 4
_left: deque[tuple[Callable[[], Any], int | None]] = deque(maxlen=64)
_kept: deque[Iterator[Any]] = deque(maxlen=_KEPT)


def leave(loader: Iterator[Any]) -> None:
    """Notes that a loop was left with a batch of an iterator; whichever shuffler the loop was of."""
    try:
        reference: Callable[[], Any] = weakref.ref(loader)
    except TypeError:
        _kept.append(loader)
        reference = functools.partial(_find_kept, id(loader))
    _left.append((reference, _place(loader)))


def was_left(loader: Iterator[Any]) -> bool:
    """Returns whether a loop was left with a batch of an iterator, as another loop over it begins.

    An iterator whose class has an `__iter__` of its own may start anew by it. So it counts as left only for
    the loop that comes next, over whatever.
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
    """Returns the batches that a DataLoader's iterator has given: with persistent workers, it is the same
    object in every epoch, and starts at 0."""
    return getattr(loader, "_num_yielded", None)
