"""The parts of the check, and how one of them runs."""

from __future__ import annotations

import importlib
import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_check.stand_in import is_stand_in

REPOSITORY = Path(__file__).parents[2]


class NotRun(Exception):
    """Raised by a part that cannot run here; the message says why."""


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        name: shown in the report.
        module, function: takes the device and returns what the report shows of a success. It raises
            `NotRun`, or any other exception for a failure.
        num_gpus: GPUs that it needs.
        packages: packages that it needs and that have no stand-in here.
    """

    name: str
    module: str
    function: str
    num_gpus: int = 1
    packages: tuple[str, ...] = ()


_TRAINING = ("torchrec", "fbgemm_gpu", "gin")
_TESTS = (*_TRAINING, "pytest", "hypothesis")
PARTS = (
    Part("packing", "rows", "packing"),
    Part("gathering", "rows", "gathering"),
    Part("alignment", "rows", "alignment"),
    Part("memory of gathering", "rows", "memory"),
    Part("exchange, one rank", "rows", "exchange", packages=("numba",)),
    Part("streams: exchange, then compute", "rows", "streams", packages=("numba",)),
    Part("attention masks", "attention", "masks"),
    Part("HSTU attention", "attention", "hstu_attention"),
    Part("Triton HSTU attention", "attention", "triton_hstu_attention"),
    Part("SID-GR attention", "attention", "sid_gr_attention"),
    Part("streams: training steps", "training_step", "streams", packages=_TRAINING),
    Part("memory of a training step", "training_step", "memory", packages=_TRAINING),
    Part("synchronizations of a training step", "training_step", "synchronizations", packages=_TRAINING),
    Part("gradient tests over NCCL", "ranks", "gradient_tests", num_gpus=2, packages=_TESTS),
    Part("exchange tests over NCCL", "ranks", "exchange_tests", num_gpus=2, packages=_TESTS),
    Part("make demo over NCCL", "ranks", "demo", num_gpus=2, packages=(*_TRAINING, "matplotlib")),
)


@dataclass(frozen=True)
class Result:
    """Outcome of a part.

    Attributes:
        part: its name.
        outcome: "passed", "failed" or "not run".
        detail: one line.
        trace: the traceback of a failure.
    """

    part: str
    outcome: str
    detail: str
    trace: str = ""


def run(part: Part, device: torch.device, num_gpus: int) -> Result:
    """Runs a part on a device, if the machine has the GPUs and packages that it needs.

    Args:
        part: the part.
        device: a GPU; "cpu" to try the code itself, as the tests of this check do.
        num_gpus: GPUs of this machine, however many the part needs.
    """
    if num_gpus < part.num_gpus:
        return Result(part.name, "not run", _needs_gpus(part.num_gpus, num_gpus))
    try:
        for package in part.packages:
            _check_installed(package, device)
        function = getattr(importlib.import_module(f"benchmarks.gpu_check.{part.module}"), part.function)
    except ImportError as error:
        return Result(part.name, "not run", str(error))
    try:
        detail = function(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # errors of kernels show up here
    except (NotRun, ImportError) as reason:
        return Result(part.name, "not run", str(reason))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        message = (str(error).splitlines() or [""])[0]
        return Result(part.name, "failed", f"{type(error).__name__}: {message}. {_place(error)}", trace)
    return Result(part.name, "passed", detail)


def without_gpu(part: Part) -> Result:
    """Returns the result of a part on a machine without a GPU."""
    return Result(part.name, "not run", _needs_gpus(part.num_gpus, 0))


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


def _needs_gpus(needed: int, there: int) -> str:
    found = {0: "there is none", 1: "there is one"}.get(there, f"there are {there}")
    return f"needs {'a GPU' if needed == 1 else f'{needed} GPUs'}; {found}"


def _check_installed(package: str, device: torch.device) -> None:
    if is_stand_in(package):
        raise ImportError(f"needs {package}, for which there is only a stand-in")
    try:
        importlib.import_module(package)
    except Exception as error:
        raise ImportError(f"needs {package}: {error}") from error
    operator = "fbgemm::permute_1D_sparse_data"
    if package == "fbgemm_gpu" and not torch._C._dispatch_has_kernel_for_dispatch_key(
        operator, device.type.upper()
    ):
        raise ImportError(f"needs fbgemm for {device.type}: the one here has no kernel of {operator} for it")


def _place(error: BaseException) -> str:
    """The innermost line of this repository in a traceback: what synchronized, say."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(REPOSITORY) and ".venv" not in path.parts:
            line = frame.line or linecache.getline(frame.filename, frame.lineno or 0)
            return f"{path.relative_to(REPOSITORY)}:{frame.lineno}: {line.strip()}"
    return ""
