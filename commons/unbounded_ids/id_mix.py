"""A bijective mix of 64-bit ids, which spreads any set of ids evenly over ranks."""

from __future__ import annotations

import torch

# The one int64 that is not an id: its mix is TorchRec's mark of a free row.
NO_ID = torch.iinfo(torch.int64).min
MARK_OF_FREE_ROW = torch.iinfo(torch.int64).max

_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_GOLDEN = 0x9E3779B97F4A7C15


def mixed(ids: torch.Tensor) -> torch.Tensor:
    """Mixes int64 ids elementwise; `unmixed` is the inverse.

    Applies the finalizer of splitmix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014), then an exclusive or with the constant that maps `NO_ID` to `MARK_OF_FREE_ROW`.
    """
    return _finalized(ids) ^ _OFFSET


def unmixed(values: torch.Tensor) -> torch.Tensor:
    """Returns the int64 ids that `mixed` maps to these values."""
    values = _unshifted(values ^ _OFFSET, _SHIFTS[2])
    values = _unshifted(values * _signed(pow(_FACTORS[1], -1, 1 << 64)), _SHIFTS[1])
    return _unshifted(values * _signed(pow(_FACTORS[0], -1, 1 << 64)), _SHIFTS[0])


def owners(values: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Returns the rank that owns each mixed id, int64.

    The rank is the unsigned mixed id modulo `num_ranks`, as in TorchRec's distribution of unbounded ids.
    """
    sign_part = (values < 0) * ((1 << 63) % num_ranks)
    return ((values & MARK_OF_FREE_ROW) % num_ranks + sign_part) % num_ranks


def fresh_rows(values: torch.Tensor, width: int, bound: float, salt: int) -> torch.Tensor:
    """Returns initial embeddings of ids, float32 `[ids, width]`, uniform in [−bound, bound).

    A row depends only on the id and the salt, not on the rank that holds it or on any random state.

    Args:
        values: mixed ids, int64 `[ids]`.
        width: width of the table.
        bound: bound of the absolute values, at least 0.
        salt: number that makes tables independent of each other.
    """
    steps = torch.arange(1, width + 1, device=values.device) * _signed(_GOLDEN)
    bits = _finalized((values ^ _signed(salt)).unsqueeze(1) + steps)
    return (_shifted(bits, 40).float() * 2**-23 - 1) * bound  # a float32 holds 24 bits


def _finalized(values: torch.Tensor) -> torch.Tensor:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, _SHIFTS[2])


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts right and fills with zeros; torch's own shift of an int64 extends the sign."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def _unshifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Returns `x`, given `x ^ _shifted(x, by)`, for `by` of at least 22."""
    return values ^ _shifted(values, by) ^ _shifted(values, 2 * by)


def _signed(value: int) -> int:
    """Returns the int64 with the lowest 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_OFFSET = int(_finalized(torch.tensor(NO_ID, device="cpu"))) ^ MARK_OF_FREE_ROW
