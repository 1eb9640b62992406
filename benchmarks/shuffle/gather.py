"""Time of the planning gather among few ranks, and a model of it for many.

torchrun --nproc_per_node 4 -m benchmarks.shuffle.gather OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from commons.training import rank_process, run_rank

KILOBYTES = (1, 2, 4, 8, 16, 32)
REPEATS = 60


def main() -> None:
    """Times small gloo all-gathers; rank 0 writes the medians."""
    with rank_process():
        measured = {}
        for kilobytes in KILOBYTES:
            mine = torch.zeros(kilobytes * 128, dtype=torch.int64)
            everything = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64)
            seconds = []
            for _ in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                dist.all_gather_into_tensor(everything, mine)
                seconds.append(time.perf_counter() - start)
            measured[kilobytes] = statistics.median(seconds) * 1e3
        if dist.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(measured))


def fit(measured: dict[int, dict[str, float]]) -> dict[str, float]:
    """Least squares of a ring: (ranks − 1) hops, each of a latency and the time for one rank's bytes.

    Args:
        measured: by ranks and kilobytes, milliseconds.
    """
    rows, milliseconds = [], []
    for ranks, of_sizes in measured.items():
        for kilobytes, value in of_sizes.items():
            rows.append((ranks - 1, (ranks - 1) * int(kilobytes)))
            milliseconds.append(value)
    (per_hop, per_kilobyte), *_ = np.linalg.lstsq(np.array(rows, dtype=float), np.array(milliseconds))
    return {"ms_per_hop": float(per_hop), "ms_per_hop_and_kilobyte": float(max(per_kilobyte, 0.0))}


def modelled(model: dict[str, float], ranks: int, kilobytes: float) -> float:
    """Milliseconds of a gather over many ranks."""
    return (ranks - 1) * (model["ms_per_hop"] + model["ms_per_hop_and_kilobyte"] * kilobytes)


if __name__ == "__main__":
    run_rank(main)
