"""The settings of a shuffler: names, defaults and checks, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.distributed.exchange import EXCHANGES
from commons.distributed.placement import PARTITIONERS

_TAKE_TOLERANCE = ("rebalance", "refined")


@dataclass(frozen=True)
class ShufflerSettings:
    """How a shuffler places and moves samples.

    Attributes:
        partitioner: the algorithm that places samples: one of `PARTITIONERS`.
        tolerance: the largest load may be (1 + tolerance) × the lower bound; None for the partitioner's
            default: 0.01 for "rebalance", 0 for "refined". The others take none.
        equal_rows: whether every rank gets the same number of rows (±1 real one); else rows follow the load.
        max_rows: limit on a rank's real rows, where rows follow the load.
        max_tokens: limit on a rank's tokens.
        window: number of consecutive steps placed together; more than 1 changes what a step contains.
        window_max_step_ratio: limit on a step's total load ÷ the window's mean; None for no limit.
        exchange: "all_to_all" or "all_gather".
        verify: whether ranks compare every plan and the samples of every exchanged batch.
        max_tokens_per_micro_batch: limit on a micro-batch's tokens; None for steps that run whole.

    Raises:
        KeyError: an unknown partitioner or exchange.
        ValueError: a value is out of range, or has no effect with the others.
    """

    partitioner: str = "refined"
    tolerance: float | None = None
    equal_rows: bool = True
    max_rows: int | None = None
    max_tokens: int | None = None
    window: int = 1
    window_max_step_ratio: float | None = None
    exchange: str = "all_to_all"
    verify: bool = False
    max_tokens_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.partitioner not in PARTITIONERS:
            raise KeyError(f"unknown partitioner {self.partitioner!r}; there are {list(PARTITIONERS)}")
        if self.exchange not in EXCHANGES:
            raise KeyError(f"unknown exchange {self.exchange!r}; there are {sorted(EXCHANGES)}")
        for name in ("max_rows", "max_tokens", "max_tokens_per_micro_batch"):
            limit = getattr(self, name)
            if limit is not None and not (isinstance(limit, int | np.integer) and limit >= 1):
                raise ValueError(f"{name}={limit!r}: expected an integer of at least 1, or None for no limit")
        for name in ("max_rows", "max_tokens"):
            limit = getattr(self, name)
            if limit is not None and self.partitioner == "karmarkar_karp":
                raise ValueError(
                    f"{name}={limit}: 'karmarkar_karp' keeps no limits; choose another partitioner"
                )
        if self.max_rows is not None and self.equal_rows:
            raise ValueError(f"max_rows={self.max_rows} has no effect with equal_rows=True")
        if self.tolerance is not None and self.partitioner not in _TAKE_TOLERANCE:
            raise ValueError(
                f"tolerance={self.tolerance} has no effect on {self.partitioner!r}: leave it None"
            )
        if self.tolerance is not None and not 0 <= self.tolerance < np.inf:
            raise ValueError(f"tolerance={self.tolerance}: expected a finite number of at least 0")
        self._check_window()

    def _check_window(self) -> None:
        if not (isinstance(self.window, int) and self.window >= 1):
            raise ValueError(f"window={self.window!r}: expected an integer of at least 1")
        if self.window_max_step_ratio is not None and not self.window_max_step_ratio >= 1:
            raise ValueError(
                f"window_max_step_ratio={self.window_max_step_ratio}: expected at least 1, or None"
            )
        if self.window == 1:
            if self.window_max_step_ratio is not None:
                raise ValueError(
                    f"window_max_step_ratio={self.window_max_step_ratio} has no effect with window=1"
                )
            return
        for name in ("tolerance", "max_rows", "max_tokens"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect with window={self.window}: leave it None"
                )
        if self.partitioner != ShufflerSettings.partitioner:
            raise ValueError(
                f"partitioner={self.partitioner!r} has no effect with window={self.window}: leave it out"
            )
