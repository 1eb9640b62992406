"""The order of a user's events that have the same time."""

from __future__ import annotations

import numpy as np

# What prepared folders name. Another order needs another version.
TIE_ORDER = "splitmix64 of user and item, version 1"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def tie_keys(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Returns keys that order events of equal time, uint64 `[events]`.

    They do not depend on the order of a file, which is often that of the items' ids: a model would learn it
    from histories in which most events are tied. They depend on the user, because an order of items that
    all users share could be learned, too.

    Args:
        users: integers `[events]`.
        items: integers `[events]`.
    """
    return _mixed(_mixed(users.astype(np.uint64) + _GOLDEN) ^ items.astype(np.uint64))


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele et al., OOPSLA 2014), a bijection of uint64."""
    for shift, factor in _STEPS:
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> np.uint64(31))
