"""One rank's exception, raised on all."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence

_IS_COPY = "raised_on_another_rank"


def portable(failure: Exception | None, rank: int) -> Exception | None:
    """A copy for other ranks, with the traceback, which does not travel, as a note."""
    if failure is None:
        return None
    where = "".join(traceback.format_exception(failure))
    try:
        copied = pickle.loads(pickle.dumps(failure))
    except Exception:
        copied = RuntimeError(f"{type(failure).__name__}: {failure}")
    copied.add_note(f"raised on rank {rank} of the ranks to balance among:\n{where}")
    copied.__dict__[_IS_COPY] = True
    return copied


def is_copy(error: BaseException) -> bool:
    """Whether another rank has raised this one, and will report it."""
    return bool(error.__dict__.get(_IS_COPY))


def raise_first(failures: Sequence[Exception | None], own: Exception | None, own_rank: int) -> None:
    """Raises the failure of the first rank that has one; there, the exception itself and no copy."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise own if own is not None and rank == own_rank else failure
