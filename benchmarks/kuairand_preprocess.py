"""Measures the memory and time of preparing KuaiRand, on synthetic logs in the format of kuairand-1k.

The number of events per user is heavy-tailed. The second size shows how memory grows with the files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from benchmarks.harness import Record

EVENTS, USERS, VIDEOS = (10_000_000, 40_000_000), 1_000, 4_000_000


def measure() -> Record:
    """Returns a record for each number of events."""
    records = []
    for num_events in EVENTS:
        with TemporaryDirectory() as directory:
            records.append(_measure(Path(directory), num_events))
    return {"records": records}


def _measure(directory: Path, num_events: int) -> Record:
    raw, out = directory / "raw", directory / "out"
    # A child writes the logs, because the preprocessor's peak memory includes this process's at the fork.
    files = ["tests.commons.datasets.kuairand_files", str(raw), str(num_events), str(USERS), str(VIDEOS)]
    subprocess.run([sys.executable, "-m", *files], check=True)
    start = time.perf_counter()
    prepare = [sys.executable, "-m", "commons.datasets.kuairand_preprocess", "--dataset", "kuairand-1k"]
    process = subprocess.Popen([*prepare, "--raw", str(raw), "--out", str(out)])
    _, status, usage = os.wait4(process.pid, 0)  # getrusage would report the largest of all children
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"the preprocessor ended with exit code {process.returncode}")
    lengths = pl.scan_parquet(out / "sequences.parquet").select(pl.col("items").list.len()).collect()
    if lengths.sum().item() != num_events:
        raise RuntimeError(f"it wrote {lengths.sum().item()} of {num_events} events")
    return {
        "events": num_events,
        "peak_resident_mb": round(usage.ru_maxrss * 1024 / 1e6),
        "seconds": round(seconds, 1),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    peaks = [f"{record['peak_resident_mb'] / 1e3:.2f}" for record in figures["records"]]
    return {"kuairand memory": f"{' and '.join(peaks)} GB"}
