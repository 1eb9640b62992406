"""Repeats the tests' checks on this machine's GPUs, and prints a report to paste into an issue.

Each part passes, fails, or does not run for a reason that the report gives. The check installs nothing. If
TorchRec or tensordict is missing, packing and attention use stand-ins for their classes, and the report says
so. The exit code is 1 if a part failed, else 0.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.gpu_check.parts import PARTS, REPOSITORY, Part, Result, is_broken, run
from benchmarks.gpu_check.stand_in import install_where_missing
from benchmarks.harness import machine
from benchmarks.markdown import markdown_table

PACKAGES = ("triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "tensordict", "numba", "numpy")


def run_parts(parts: Sequence[Part] = PARTS) -> tuple[list[Result], list[str]]:
    """Runs parts on this machine's GPUs, and returns the results and the stand-ins. Progress is on stderr."""
    stand_ins = install_where_missing()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", 0)
    results: list[Result] = []
    broken_by = ""
    for part in parts:
        if broken_by and part.num_gpus == 1:
            results.append(Result(part.name, "not run", f"{broken_by!r} left the GPU unusable"))
            continue
        if num_gpus:
            print(f"{part.name} …", file=sys.stderr, flush=True)
        results.append(run(part, device, num_gpus))
        if results[-1].outcome == "failed" and is_broken(device):
            broken_by = part.name
    return results, stand_ins


def make_report(results: Sequence[Result], stand_ins: Sequence[str]) -> str:
    """Returns the report: the machine, one line per part, and the traceback of each failure."""
    described = describe_machine()
    if stand_ins:
        described.append(["stand-ins", "; ".join(stand_ins)])
    rows = [[result.part, result.outcome, result.detail.replace("|", "\\|")] for result in results]
    rows = [[cell.replace("\n", " ") for cell in row] for row in rows]
    outcomes = [result.outcome for result in results]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "not run"))
    traces = [f"{result.part}:\n\n```text\n{result.trace}```\n" for result in results if result.trace]
    tables = [markdown_table(["", ""], described), markdown_table(["part", "result", ""], rows)]
    return "\n\n".join(["# gpu-check", *tables, f"{counts}.", *traces])


def describe_machine() -> list[list[str]]:
    """Returns (name, value) rows that describe the GPUs, the CPU, the versions, and the commit."""
    from hstu.modules.triton_compiler import ptxas_version  # needs TorchRec or its stand-in

    described = machine()
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    cpu = f"{described['cpu']}, {described['cores']} cores, {platform.system()} {platform.release()}"
    return [
        ["GPUs", _list_gpus()],
        ["CPU", cpu],
        ["Python, torch", f"{described['python']}, {described['torch']}"],
        ["CUDA, NCCL", f"{torch.version.cuda or 'none'}, {_find_nccl()}"],
        ["Triton's ptxas", ptxas_version() or "none"],
        ["packages", ", ".join(f"{name} {installed.get(name, '–')}" for name in PACKAGES)],
        ["commit", _find_commit()],
    ]


def _list_gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in found]
    return "; ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def _find_nccl() -> str:
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _find_commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    """Prints the report on stdout, and returns the exit code."""
    argparse.ArgumentParser("python -m benchmarks.gpu_check", description=__doc__).parse_args()
    results, stand_ins = run_parts()
    print(make_report(results, stand_ins))
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
