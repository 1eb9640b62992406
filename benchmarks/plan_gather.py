"""The gather of a plan: a channel's, in log2(ranks) rounds, against gloo's own around a ring.

Processes share this machine's cores, so that their times are mostly waits for a core. Both gathers alternate
in one run, for a fair ratio. A model tells what many ranks would take: delays are injected into every hop of
a channel's gather, which finds how many hops one after another it has; the software of a hop is measured
among few processes, which have a core each.
"""

from __future__ import annotations

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

from benchmarks.harness import Record, in_turn, machine, milliseconds, progress, spread
from benchmarks.markdown import Cell, pivot, table
from commons.distributed.channel import Channel

RANKS = (2, 8, 16, 32, 64)
COLUMNS = 8  # int64 of a sample of HSTU
ROWS = 32  # samples per rank
ROUNDS, WARM_UP = 30, 3
DELAYS_MS, DELAYED_ROUNDS = (0.0, 20.0, 40.0), 6
MODELED_RANKS, MODELED_DELAYS_US = (64, 256, 1024), (20.0, 100.0, 500.0)
MODELED_BYTES_PER_MS = 1.25e6  # 10 Gbit/s


def measure() -> Record:
    """Returns what was measured, and the model."""
    measured = [_on_processes(ranks) for ranks in progress(RANKS, "gathers")]
    return {"measured": measured, "model": _model(measured), "machine": machine()}


def _on_processes(ranks: int) -> Record:
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
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    figures = _measure(rank, ranks)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort in the interpreter's cleanup


def _measure(rank: int, ranks: int) -> Record:
    channel = Channel(rank, ranks, dist.group.WORLD, tag=1)
    row = np.arange(ROWS * COLUMNS) + rank
    mine, gathered = torch.from_numpy(row), torch.empty(ranks * len(row), dtype=torch.int64)
    gathers: dict[str, Callable[[], Any]] = {
        "channel": lambda: channel.all_gather(row),
        "gloo": lambda: dist.all_gather_into_tensor(gathered, mine),
    }
    if not np.array_equal(channel.all_gather(row), row - rank + np.arange(ranks)[:, None]):
        raise RuntimeError("the channel gathered something else than the rows")
    times: dict[str, list[float]] = {name: [] for name in gathers}
    for name in in_turn(gathers, WARM_UP + ROUNDS):
        times[name].append(_timed(gathers[name]))
    times = {name: of_gather[WARM_UP:] for name, of_gather in times.items()}
    delayed = {}
    for delay in DELAYS_MS:
        with _delayed_hops(delay):
            delayed[delay] = statistics.median(_timed(gathers["channel"]) for _ in range(DELAYED_ROUNDS))
    return {
        "ranks": ranks,
        "kilobytes_per_rank": row.nbytes / 1e3,
        "ms": {name: spread(values) for name, values in times.items()},
        "median_ratio": float(np.median(np.divide(times["channel"], times["gloo"]))),
        "delayed_ms": delayed,
        # Milliseconds per millisecond of delay: the hops that follow one another.
        "hops_in_a_row": float(np.polyfit(list(delayed), list(delayed.values()), 1)[0]),
    }


def _timed(gather: Callable[[], Any]) -> float:
    dist.barrier()
    return milliseconds(gather)


@contextmanager
def _delayed_hops(delay_ms: float) -> Iterator[None]:
    """While active, each message of a channel arrives so much later."""
    receive = dist.irecv

    class Delayed:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._message = receive(*arguments, **settings)

        def wait(self) -> None:
            self._message.wait()
            time.sleep(delay_ms / 1e3)

    with mock.patch.object(dist, "irecv", Delayed if delay_ms else receive):
        yield


def _model(measured: list[Record]) -> Record:
    """Milliseconds among many ranks on hosts of their own: hops in a row × (delay + software of a hop), and
    the time that the rows of all other ranks take to arrive."""
    row_bytes = measured[0]["kilobytes_per_rank"] * 1e3
    # Among two ranks, either gather is one hop.
    software, ring = (measured[0]["ms"][name]["median"] for name in ("channel", "gloo"))

    def gathers(ranks: int, delay_us: float) -> dict[str, float]:
        arriving = (ranks - 1) * row_bytes / MODELED_BYTES_PER_MS
        return {
            "channel": (ranks - 1).bit_length() * (software + delay_us / 1e3) + arriving,
            "gloo": (ranks - 1) * (ring + delay_us / 1e3) + arriving,
        }

    return {
        "software_ms_per_hop": software,
        "software_ms_per_hop_of_gloo": ring,
        "ms": {
            ranks: {delay: gathers(ranks, delay) for delay in MODELED_DELAYS_US} for ranks in MODELED_RANKS
        },
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    measured: dict[str, Cell] = {
        "processes": "{ranks}",
        "gloo, ms": "{ms[gloo][median]:.1f} ({ms[gloo][min]:.1f} to {ms[gloo][max]:.1f})",
        "channel, ms": "{ms[channel][median]:.1f} ({ms[channel][min]:.1f} to {ms[channel][max]:.1f})",
        "median ratio": "{median_ratio:.2f}",
        "hops in a row": "{hops_in_a_row:.1f}",
    }
    modeled = [
        {"ranks": ranks, "delay": float(delay), **ms}
        for ranks, of_delays in figures["model"]["ms"].items()
        for delay, ms in of_delays.items()
    ]
    return {
        "plan-gather gloo": table(figures["measured"], measured),
        "plan-gather model": pivot(
            modeled, {"ranks": "{ranks}"}, "{delay:.0f} µs", "{gloo:.1f} / {channel:.1f}"
        ),
    }
