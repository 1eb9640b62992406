"""One rank's exception, raised on all."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_IS_COPY = "raised_on_another_rank"


def portable(failure: Exception | None) -> tuple[Exception | None, bool]:
    """What other ranks can be sent: a copy, with the traceback, which does not travel, as a note.

    Returns:
        The copy, None without a failure; and whether it was raised on this rank, not told by another one.
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
    """Whether another rank has raised this one, and will report it."""
    return bool(error.__dict__.get(_IS_COPY))


def raise_first(
    failures: Sequence[tuple[Exception | None, bool]], own: Exception | None, own_rank: int
) -> None:
    """Raises the failure of the first rank that has one of its own; there, the exception itself.

    Args:
        failures: of each rank, from `portable`.
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
    """A value of one rank, on all ranks of a group. Collective.

    Args:
        sender: the rank that has it.
        value: what it sends; of no interest elsewhere.
        rank: this rank.
        all_gather: gathers anything that pickles over the group.

    Raises:
        TypeError: the value does not pickle; on every rank.
    """
    failure, pickled = None, None
    if rank == sender:
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            failure = TypeError(
                f"a batch of rank {rank} does not pickle ({error}), and a rank that has none yet needs it "
                "for its type and what its samples share; keep functions and handles out of batches"
            )
    gathered = all_gather((pickled, portable(failure)))
    raise_first([failed for _, failed in gathered], failure, rank)
    return value if rank == sender else pickle.loads(gathered[sender][0])
