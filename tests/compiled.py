"""Compiles the partition functions that tests call, as far as the checkout has what calls them."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from commons.distributed.placement import compile_refine, warm_up
from commons.distributed.shuffler_settings import ShufflerSettings

_FEATURES = {
    "micro_batches": ("MicroBatches", [1]),
    "sample_groups": ("SampleGroups", ["user"]),
    "sample_splitting": ("SplitSamples", []),
}


def compile_kernels() -> None:
    """Compiles them, or loads them from numba's cache."""
    warm_up(ShufflerSettings())
    compile_refine()
    for module, (name, arguments) in _FEATURES.items():
        with suppress(ModuleNotFoundError):
            getattr(import_module(f"commons.features.{module}"), name)(*arguments).warm_up()
