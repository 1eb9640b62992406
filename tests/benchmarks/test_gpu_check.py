"""The GPU check ends well without a GPU, and its parts run: here on the CPU, with TorchRec and without."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_check.__main__ import make_report
from benchmarks.gpu_check.parts import PARTS, REPOSITORY, Part, run
from tests.e2e.torchrun import ENVIRONMENT, python

CPU = torch.device("cpu")


def _row(name: str, printed: str) -> list[str]:
    """The cells of a part's row in the report."""
    [line] = (line for line in printed.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_without_a_gpu_it_says_of_every_part_why_it_was_not_run():
    printed = python(REPOSITORY, "-m", "benchmarks.gpu_check")
    for part in PARTS:
        gpus = "a GPU" if part.num_gpus == 1 else "2 GPUs"
        assert _row(part.name, printed)[1:] == ["not run", f"needs {gpus}; there is none"]
    assert torch.__version__ in printed
    summary = f"0 passed, 0 failed, {len(PARTS)} not run"
    assert summary in printed and summary in (REPOSITORY / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("hidden", [(), ("torchrec", "tensordict", "fbgemm_gpu")])
def test_parts_for_one_gpu_run_with_torchrec_and_with_stand_ins(hidden):
    command = ["-m", "tests.benchmarks.gpu_check_on_cpu", *hidden]
    if hidden:  # a fork has imported them
        command = [sys.executable, *command]
        done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        printed = python(REPOSITORY, *command)
    stand_ins, results = json.loads(printed.splitlines()[-1])
    assert [name.partition(" ")[0] for name in stand_ins] == ["torchrec"] * bool(hidden)
    parts = {part.name: part for part in PARTS}
    assert len(results) == len(PARTS) - (1 if hidden else 3)
    for result in results:
        part = parts[result["part"]]
        if part.num_gpus > 1:
            reason = "needs 2 GPUs; there is one"
        elif set(hidden) & set(part.packages):
            reason = "needs torchrec, for which there is only a stand-in"
        elif part.function == "check_memory":
            reason = "reads the counters of torch's CUDA allocator"
        elif part.function == "check_triton_hstu":
            reason = "Triton's kernels run on GPUs"
        else:
            assert result["outcome"] == "passed", result["detail"] + result["trace"]
            continue
        assert (result["outcome"], result["detail"]) == ("not run", reason), part.name
    kinds = "stand-in jagged tensors" if hidden else "TorchRec's jagged tensors"
    assert kinds in results[0]["detail"]


ONE_STEP = """
import runpy
from benchmarks.gpu_check import processes, training_step

training_step.STEPS = 1  # on a CPU, no stream is late
runpy.run_module(processes._MODULE, run_name="__main__")
"""


def test_the_sanitizers_process_runs_the_cases_of_streams(tmp_path):
    (tmp_path / "one_step.py").write_text(ONE_STEP)
    printed = python(tmp_path, "one_step.py", "cpu")
    assert printed.splitlines()[-1] == (
        "streams: exchange, then compute: passed; streams: training steps: passed"
    )


def test_a_failure_is_reported_with_its_line_and_its_traceback():
    result = run(Part("broken", "rows", "move"), CPU, 1)  # a function that takes another argument
    assert result.outcome == "failed"
    assert "missing 1 required positional argument" in result.detail
    assert "benchmarks/gpu_check/parts.py:" in result.detail
    printed = make_report([result], [])
    assert "0 passed, 1 failed, 0 not run." in printed
    assert printed.endswith(f"```text\n{result.trace}```\n")
