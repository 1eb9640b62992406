"""Compiles what tests run, so that processes find it in the cache."""

import contextlib
import fcntl
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from commons.distributed import ShufflerSettings
from tests.commons.distributed.internals import compile_from_scratch, warm_up

# Extensions that compile something, with their arguments.
_COMPILING = {
    "sample_groups.SampleGroups": (),
    "pieces.Pieces": (),
    "padded.Padded": (),
    "micro_batches.MicroBatches": (1,),
}


def compile_kernels() -> None:
    """Compiles the kernels of the core, and of the extensions that there are.

    Processes that do so at once share the work: each first compiles what no other is at.
    """
    # One after another: together, micro-batches would keep the partitioner from tokens.
    parts = [partial(warm_up, ShufflerSettings()), compile_from_scratch]
    for path, arguments in _COMPILING.items():
        package, _, name = f"commons.extensions.{path}".rpartition(".")
        # Without its files, a folder still is a package.
        if find_spec("commons.extensions") and (found := find_spec(package)) and found.origin:
            parts.append(getattr(import_module(package), name)(*arguments).warm_up)
    with open(__file__, "r+") as file:
        for flag in (fcntl.LOCK_NB, 0):
            for number, compile_part in enumerate(parts):
                with contextlib.suppress(BlockingIOError):
                    fcntl.lockf(file, fcntl.LOCK_EX | flag, 1, number)
                    compile_part()
                    fcntl.lockf(file, fcntl.LOCK_UN, 1, number)
