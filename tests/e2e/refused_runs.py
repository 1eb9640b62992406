"""Runs of an entry point that are to fail, one after the other in one process, which starts only once.

python -m tests.e2e.refused_runs MODULE REFUSALS.json < RUNS.json

RUNS has by name the arguments of each run; REFUSALS gets by name what it raised, empty if it did not.
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import importlib
import json
import subprocess
import sys
import traceback
from pathlib import Path

import gin
import torch.distributed as dist

from tests.e2e.torchrun import ENVIRONMENT


def refusals(directory: Path, module: str, runs: dict[str, list[str]]) -> dict[str, str]:
    """What each run of `module` in `directory` raised, as Python prints it, by the run's name."""
    answers = directory / "refusals.json"
    subprocess.run(
        [sys.executable, "-m", "tests.e2e.refused_runs", module, answers],
        input=json.dumps(runs),
        cwd=directory,
        env=ENVIRONMENT,
        check=True,
        text=True,
        timeout=120.0,
    )
    return json.loads(answers.read_text())


def main() -> None:
    module, answers = sys.argv[1:]
    entry_point = importlib.import_module(module)
    raised = {}
    for name, arguments in json.load(sys.stdin).items():
        sys.argv = [module, *arguments]
        gin.clear_config()
        raised[name] = ""
        try:
            entry_point.main()
        except Exception as error:
            raised[name] = "".join(traceback.format_exception_only(error))
        if dist.is_initialized():
            dist.destroy_process_group()
    Path(answers).write_text(json.dumps(raised))


if __name__ == "__main__":
    main()
