"""Compiles, or loads, all kernels that tests may reach, before any test."""

from __future__ import annotations

from commons.distributed.placement import warm_up
from commons.distributed.shuffler_settings import ShufflerSettings


def compile_kernels() -> None:
    warm_up(ShufflerSettings(max_tokens_per_micro_batch=1), has_groups=True)
    warm_up(ShufflerSettings(equal_rows=False, split=True))
