"""The gather of a plan: a channel's, in log2(ranks) rounds, against gloo's own around a ring.

Processes share this machine's cores, so that their times are mostly waits for a core. Both gathers alternate
in one run, for a fair ratio. A model tells what many ranks would take: delays are injected into every hop of
a channel's gather, which finds how many hops one after another it has; the software of a hop is measured
among few processes, which have a core each.

    python -m benchmarks.plan_gather
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine, spread
from benchmarks.markdown import markdown_table, publish
from commons.distributed.channel import Channel

BENCHMARKS = Path(__file__).parent
RESULT, README = BENCHMARKS / "results" / "plan_gather.json", BENCHMARKS / "README.md"
RANKS = (2, 8, 16, 32, 64)
COLUMNS = 8  # int64 of a sample of HSTU
ROWS = 32  # samples per rank
ROUNDS, WARM_UP = 30, 3
DELAYS_MS = (0.0, 20.0, 40.0)
DELAYED_ROUNDS = 6
MODELED_RANKS, MODELED_DELAYS_US = (64, 256, 1024), (20.0, 100.0, 500.0)
MODELED_BYTES_PER_MS = 1.25e6  # 10 Gbit/s


def main() -> None:
    """Prints the tables and writes them to `README`, with `RESULT`."""
    parse_arguments(__doc__)
    measured = [_on_processes(ranks) for ranks in tqdm(RANKS, desc="gathers")]
    figures = {"measured": measured, "model": _model(measured), "machine": machine()}
    publish(figures, make_tables(figures), RESULT, README, "plan-gather")


def _on_processes(ranks: int) -> dict[str, Any]:
    """Runs `_measure` in forks of this process, which share its imports."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_rank, args=(rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return json.loads((Path(folder) / "result.json").read_text())


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    figures = _measure(rank, ranks)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort in the interpreter's cleanup


def _measure(rank: int, ranks: int) -> dict[str, Any]:
    channel = Channel(rank, ranks, dist.group.WORLD, tag=1)
    row = np.arange(ROWS * COLUMNS) + rank
    mine, table = torch.from_numpy(row), torch.empty(ranks * len(row), dtype=torch.int64)
    gathers: dict[str, Callable[[], Any]] = {
        "channel": lambda: channel.all_gather(row),
        "gloo": lambda: dist.all_gather_into_tensor(table, mine),
    }
    if not np.array_equal(channel.all_gather(row), row - rank + np.arange(ranks)[:, None]):
        raise RuntimeError("the channel gathered something else than the rows")
    milliseconds: dict[str, list[float]] = {name: [] for name in gathers}
    for turn in range(WARM_UP + ROUNDS):
        for name, gather in gathers.items():
            passed = _timed(gather)
            if turn >= WARM_UP:
                milliseconds[name].append(passed)
    delayed = {}
    for delay in DELAYS_MS:
        with _delayed_hops(delay):
            delayed[delay] = statistics.median(_timed(gathers["channel"]) for _ in range(DELAYED_ROUNDS))
    return {
        "ranks": ranks,
        "kilobytes_per_rank": row.nbytes / 1e3,
        "ms": {name: spread(values) for name, values in milliseconds.items()},
        "median_ratio": statistics.median(
            ours / of_gloo for ours, of_gloo in zip(*milliseconds.values(), strict=True)
        ),
        "delayed_ms": delayed,
        # Milliseconds per millisecond of delay: the hops that follow one another.
        "hops_in_a_row": float(np.polyfit(list(delayed), list(delayed.values()), 1)[0]),
    }


def _timed(gather: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    gather()
    return (time.perf_counter() - start) * 1e3


@contextmanager
def _delayed_hops(milliseconds: float) -> Iterator[None]:
    """While active, each message of a channel arrives so much later."""
    receive = dist.irecv

    class Delayed:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._message = receive(*arguments, **settings)

        def wait(self) -> None:
            self._message.wait()
            time.sleep(milliseconds / 1e3)

    with mock.patch.object(dist, "irecv", Delayed if milliseconds else receive):
        yield


def _model(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds among many ranks on hosts of their own: hops in a row × (delay + software of a hop), and
    the time that the rows of all other ranks take to arrive."""
    row_bytes = measured[0]["kilobytes_per_rank"] * 1e3
    arriving = {ranks: (ranks - 1) * row_bytes / MODELED_BYTES_PER_MS for ranks in MODELED_RANKS}
    software = measured[0]["ms"]["channel"]["median"]  # among two ranks one hop
    ring = measured[0]["ms"]["gloo"]["median"]
    return {
        "software_ms_per_hop": software,
        "software_ms_per_hop_of_gloo": ring,
        "ms": {
            ranks: {
                delay: {
                    "channel": (ranks - 1).bit_length() * (software + delay / 1e3) + of_bytes,
                    "gloo": (ranks - 1) * (ring + delay / 1e3) + of_bytes,
                }
                for delay in MODELED_DELAYS_US
            }
            for ranks, of_bytes in arriving.items()
        },
    }


def make_tables(figures: dict[str, Any]) -> dict[str, str]:
    """Returns Markdown by table."""
    return {"gloo": _measured_table(figures["measured"]), "model": _model_table(figures["model"])}


def _measured_table(measured: list[dict[str, Any]]) -> str:
    def cell(ms: dict[str, float]) -> str:
        return f"{ms['median']:.1f} ({ms['min']:.1f} to {ms['max']:.1f})"

    rows = [
        [
            str(of["ranks"]),
            cell(of["ms"]["gloo"]),
            cell(of["ms"]["channel"]),
            f"{of['median_ratio']:.2f}",
            f"{of['hops_in_a_row']:.1f}",
        ]
        for of in measured
    ]
    return markdown_table(["processes", "gloo, ms", "channel, ms", "median ratio", "hops in a row"], rows)


def _model_table(model: dict[str, Any]) -> str:
    rows = [
        [str(ranks), *(f"{of['gloo']:.1f} / {of['channel']:.1f}" for of in of_delays.values())]
        for ranks, of_delays in model["ms"].items()
    ]
    return markdown_table(["ranks", *(f"{delay:.0f} µs" for delay in MODELED_DELAYS_US)], rows)


if __name__ == "__main__":
    main()
