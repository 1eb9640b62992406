"""Finds the version of Triton's assembler, and warns of a version that miscompiles kernels like HSTU's."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import subprocess

logger = logging.getLogger(__name__)
# This ptxas miscompiles kernels with several products on Hopper. Triton 3.6.0 and 3.7.1 bundle it (triton
# issues 10486, 10573, and 11366).
_WRONG_PTXAS, _HOPPER = "12.8.93", (9, 0)


@functools.cache
def ptxas_version() -> str:
    """Returns the version of the ptxas that Triton calls, such as "12.9.86"; empty if it is unknown."""
    try:
        from triton import knobs

        path = knobs.nvidia.ptxas.path
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (ImportError, AttributeError, RuntimeError, OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", printed)
    return found[1] if found else ""


@functools.cache
def warn_of_wrong_code(chip: tuple[int, int]) -> None:
    """Warns, once per process, if kernels for a chip of this compute capability may be miscompiled."""
    if chip == _HOPPER and ptxas_version() == _WRONG_PTXAS:
        logger.warning(
            f"Triton {importlib.metadata.version('triton')} compiles with ptxas {_WRONG_PTXAS}, which gets "
            "kernels like HSTU's wrong on sm_90: set TRITON_PTXAS_PATH to a ptxas of CUDA 12.9 or later, or "
            'kernel_backend = "pytorch"'
        )
