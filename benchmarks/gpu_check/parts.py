"""The parts of the GPU check, and the function that runs a part."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_check.stand_in import is_stand_in

REPOSITORY = Path(__file__).parents[2]


class NotRun(Exception):
    """Raised by a part that cannot run here. The message says why."""


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        name: name in the report.
        module, function: names of a module and its function. The function takes the device and returns the
            report's text. It raises `NotRun` if it cannot run, and any other exception on failure.
        num_gpus: number of GPUs that the part needs.
        packages: packages that the part needs. A stand-in does not suffice.
    """

    name: str
    module: str
    function: str
    num_gpus: int = 1
    packages: tuple[str, ...] = ()


_TRAINING = ("torchrec", "fbgemm_gpu", "gin")
_TESTS = (*_TRAINING, "pytest", "hypothesis")
PARTS = (
    Part("packing and gathering", "rows", "check_packing"),
    Part("memory of gathering", "rows", "check_memory"),
    Part("exchange, one rank", "rows", "check_exchange", packages=("numba",)),
    Part("streams: exchange, then compute", "rows", "check_streams", packages=("numba",)),
    Part("HSTU attention", "attention", "check_hstu"),
    Part("Triton HSTU attention", "attention", "check_triton_hstu"),
    Part("SID-GR attention", "attention", "check_sid_gr"),
    Part("streams: training steps", "training_step", "check_streams", packages=_TRAINING),
    Part("streams under the CUDA sanitizer", "processes", "check_sanitized", packages=("numba",)),
    Part("gradient tests over NCCL", "processes", "run_gradient_tests", num_gpus=2, packages=_TESTS),
    Part("exchange tests over NCCL", "processes", "run_exchange_tests", num_gpus=2, packages=_TESTS),
)


@dataclass(frozen=True)
class Result:
    """The outcome of a part.

    Attributes:
        part: the part's name.
        outcome: "passed", "failed", or "not run".
        detail: one line about the outcome.
        trace: the traceback of a failure, else "".
    """

    part: str
    outcome: str
    detail: str
    trace: str = ""


def run(part: Part, device: torch.device, num_gpus: int) -> Result:
    """Runs a part on a device, if the machine has the GPUs and packages that it needs.

    Args:
        part: the part.
        device: a GPU. The tests of this check pass the CPU.
        num_gpus: number of GPUs in this machine.
    """
    if num_gpus < part.num_gpus:
        needed = "a GPU" if part.num_gpus == 1 else f"{part.num_gpus} GPUs"
        there = {0: "there is none", 1: "there is one"}.get(num_gpus, f"there are {num_gpus}")
        return Result(part.name, "not run", f"needs {needed}; {there}")
    try:
        for package in part.packages:
            _check_installed(package, device)
        function = getattr(importlib.import_module(f"benchmarks.gpu_check.{part.module}"), part.function)
        detail = function(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises the errors of kernels
    except (NotRun, ImportError) as reason:
        return Result(part.name, "not run", str(reason))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        message = (str(error).splitlines() or [""])[0]
        place = _find_line(traceback.extract_tb(error.__traceback__))
        return Result(part.name, "failed", f"{type(error).__name__}: {message}. {place}", trace)
    return Result(part.name, "passed", detail)


def is_broken(device: torch.device) -> bool:
    """Returns whether an earlier error has left the device unusable for this process."""
    try:
        torch.cuda.synchronize(device)
        return not bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:
        return True


@contextmanager
def no_synchronization(device: torch.device) -> Iterator[None]:
    """While active, an operation that makes the host wait for the GPU raises an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _find_line(stack: traceback.StackSummary) -> str:
    """Returns the innermost stack line in this repository, or ""."""
    for frame in reversed(stack):
        path = Path(frame.filename)
        if path.is_relative_to(REPOSITORY) and ".venv" not in path.parts:
            return f"{path.relative_to(REPOSITORY)}:{frame.lineno}: {frame.line}"
    return ""


def _check_installed(package: str, device: torch.device) -> None:
    if is_stand_in(package):
        raise ImportError(f"needs {package}, for which there is only a stand-in")
    try:
        importlib.import_module(package)
    except Exception as error:
        raise ImportError(f"needs {package}: {error}") from error
    operator, key = "fbgemm::permute_1D_sparse_data", device.type.upper()
    if package == "fbgemm_gpu" and not torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
        raise ImportError(f"needs fbgemm for {device.type}: the one here has no kernel of {operator} for it")
