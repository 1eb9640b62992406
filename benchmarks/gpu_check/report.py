"""The report of the check, in Markdown to be pasted into an issue."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.gpu_check.parts import REPOSITORY, Result
from benchmarks.harness import machine
from benchmarks.markdown import markdown_table

_PACKAGES = ("triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "tensordict", "numba", "numpy")


def report(results: Sequence[Result], stand_ins: Sequence[str]) -> str:
    """Returns the report: the machine, a line per part, and the traceback of each failure."""
    rows = [[result.part, result.outcome, result.detail.replace("|", "\\|")] for result in results]
    rows = [[cell.replace("\n", " ") for cell in row] for row in rows]
    described = _machine()
    if stand_ins:
        described.append(["stand-ins", "; ".join(stand_ins)])
    counts = [f"{_count(results, outcome)} {outcome}" for outcome in ("passed", "failed", "not run")]
    traces = [f"{result.part}:\n\n```text\n{result.trace}```\n" for result in results if result.trace]
    return "\n".join(
        [
            "# gpu-check",
            "",
            markdown_table(["", ""], described),
            "",
            markdown_table(["part", "result", ""], rows),
            "",
            f"{', '.join(counts)}.",
            *(f"\n{trace}" for trace in traces),
        ]
    )


def _count(results: Sequence[Result], outcome: str) -> int:
    return sum(result.outcome == outcome for result in results)


def _machine() -> list[list[str]]:
    described = machine()
    return [
        ["GPUs", _gpus()],
        ["CPU", f"{described['cpu']}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"],
        ["Python, torch", f"{described['python']}, {described['torch']}"],
        ["CUDA, NCCL", f"{torch.version.cuda or 'none'}, {_nccl()}"],
        ["packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)],
        ["commit", _commit()],
    ]


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in found]
    return "; ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def _nccl() -> str:
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(
            command, cwd=REPOSITORY, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
