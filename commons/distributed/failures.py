"""One rank's exception, raised on all."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from commons.distributed.channel import to_bytes

_IS_COPY = "raised_on_another_rank"


def portable(failure: Exception | None) -> tuple[Exception | None, bool]:
    """Makes a copy of a failure to send to other ranks, with its traceback, which does not pickle, as a note.

    Returns:
        The copy, or None without a failure; and whether it was raised on this rank, not received from one.
    """
    if failure is None or is_copy(failure):
        return failure, False
    where = "".join(traceback.format_exception(failure))
    try:
        copied = pickle.loads(pickle.dumps(failure))
    except Exception:
        copied = RuntimeError(f"{type(failure).__name__}: {failure}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    copied.add_note(f"raised on rank {rank}:\n{where}")
    copied.__dict__[_IS_COPY] = True
    return copied, True


def is_copy(error: BaseException) -> bool:
    """Returns whether another rank raised this error, and will report it."""
    return bool(error.__dict__.get(_IS_COPY))


def raise_first(
    failures: Sequence[tuple[Exception | None, bool]], own: Exception | None, own_rank: int
) -> None:
    """Raises the failure of the first rank that has one; on that rank, the exception itself.

    Args:
        failures: each rank's, from `portable`.
        own: this rank's.
        own_rank: this rank.
    """
    raised = [
        (not original, rank) for rank, (failure, original) in enumerate(failures) if failure is not None
    ]
    if raised:
        _, rank = min(raised)
        failure, _ = failures[rank]
        raise own if rank == own_rank and own is not None else failure  # type: ignore[misc]


def sent_by(sender: int, value: Any, rank: int, all_gather: Callable[[Any], list[Any]]) -> Any:
    """Broadcasts a value of one rank to all ranks of a group, and returns it. Collective.

    Args:
        sender: the rank that has it.
        value: the value; ignored on other ranks.
        rank: this rank.
        all_gather: gathers anything that pickles over the group.

    Raises:
        TypeError: the value does not pickle; on every rank.
    """
    failure, pickled = None, None
    if rank == sender:
        try:
            pickled = to_bytes(value)
        except Exception as error:
            failure = TypeError(
                f"a batch of rank {rank} does not pickle ({error}), and a rank that has none yet needs it "
                "for its type and what its samples share; keep functions and handles out of batches"
            )
    gathered = all_gather((pickled, portable(failure)))
    raise_first([failed for _, failed in gathered], failure, rank)
    return value if rank == sender else pickle.loads(gathered[sender][0])
