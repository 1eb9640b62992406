"""A bijective mix of 64-bit ids: any set of ids, mixed, is spread evenly over ranks."""

from __future__ import annotations

import torch

# The one int64 that is no id: its mix is TorchRec's mark of a row without an id.
NO_ID = torch.iinfo(torch.int64).min
MARK_OF_FREE_ROW = torch.iinfo(torch.int64).max

_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_GOLDEN = 0x9E3779B97F4A7C15


def mixed(ids: torch.Tensor) -> torch.Tensor:
    """Each int64 of `ids` as another one; elementwise, and undone by `unmixed`.

    The finaliser of splitmix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA
    2014), and an exclusive or with a constant that takes `NO_ID` to `MARK_OF_FREE_ROW`.
    """
    return _finalised(ids) ^ _OFFSET


def unmixed(values: torch.Tensor) -> torch.Tensor:
    """The ids, int64, that `mixed` made these values of."""
    values = _unshifted(values ^ _OFFSET, _SHIFTS[2])
    values = _unshifted(values * _signed(pow(_FACTORS[1], -1, 1 << 64)), _SHIFTS[1])
    return _unshifted(values * _signed(pow(_FACTORS[0], -1, 1 << 64)), _SHIFTS[0])


def owners(values: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The rank, int64, that has the row of each mixed id: its remainder, as TorchRec's input distribution
    divides ids without a largest one, which takes an int64 for an unsigned number.
    """
    of_sign = (values < 0) * ((1 << 63) % num_ranks)
    return ((values & MARK_OF_FREE_ROW) % num_ranks + of_sign) % num_ranks


def fresh_rows(values: torch.Tensor, width: int, bound: float, salt: int) -> torch.Tensor:
    """What an id's embedding begins as: float32 `[ids, width]`, uniform in [−bound, bound).

    A function of the id and the salt alone, so that it depends neither on the rank that holds the row nor
    on the state of a generator of random numbers.

    Args:
        values: int64 `[ids]`, mixed.
        width: of the table.
        bound: at least 0.
        salt: makes the numbers of one table independent of those of another.
    """
    steps = torch.arange(1, width + 1, device=values.device) * _signed(_GOLDEN)
    bits = _finalised((values ^ _signed(salt)).unsqueeze(1) + steps)
    return (_shifted(bits, 40).float() * 2**-23 - 1) * bound  # 24 bits are what a float32 holds


def _finalised(values: torch.Tensor) -> torch.Tensor:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, _SHIFTS[2])


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros coming in; torch's own shift of an int64 brings its sign in."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def _unshifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """`x` of `x ^ _shifted(x, by)`, for `by` of at least 22."""
    return values ^ _shifted(values, by) ^ _shifted(values, 2 * by)


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_OFFSET = int(_finalised(torch.tensor(NO_ID))) ^ MARK_OF_FREE_ROW
