"""`make cluster-check`, with few processes."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_processes_lose_nothing_and_end_when_one_is_killed():
    command = [sys.executable, "-m", "benchmarks.cluster_check", "4", "14"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps, planning, exchange, last = ran.stdout.splitlines()
    assert steps.startswith("4 processes, 14 steps: ") and "3 groups" in steps
    assert planning.startswith("4 processes, one killed in planning: the last one ended ")
    assert exchange.startswith("4 processes, one killed in exchange: the last one ended ")
    assert last == "nothing was lost, and all processes ended"
