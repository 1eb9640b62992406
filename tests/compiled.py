"""Compiles what tests run, so that processes find it in the cache."""

from importlib import import_module
from importlib.util import find_spec

from commons.distributed import ShufflerSettings
from tests.commons.distributed.internals import compile_from_scratch, warm_up

# Extensions that compile something, with their arguments.
_COMPILING = {
    "micro_batches.MicroBatches": (1,),
    "sample_groups.SampleGroups": (),
    "pieces.Pieces": (),
    "padded.Padded": (),
}


def compile_kernels() -> None:
    """Compiles the kernels of the core, and of the extensions that there are."""
    extensions = []
    for path, arguments in _COMPILING.items():
        package, _, name = f"commons.extensions.{path}".rpartition(".")
        # Without its files, a folder still is a package.
        if find_spec("commons.extensions") and (found := find_spec(package)) and found.origin:
            extensions.append(getattr(import_module(package), name)(*arguments))
    warm_up(ShufflerSettings())
    for extension in extensions:  # together, micro-batches would keep the partitioner from tokens
        extension.warm_up()
    compile_from_scratch()
