"""Adds up the cost of the stage in a step on many GPUs, from measured and counted parts.

    python -m benchmarks.stage_cost [--node-gbit N] [--gpu-gbit N]

Compute times and bytes come from `make bench NAME=partition`, `gather`, and `exchange-kernels`. Network times
are computed, and include neither NCCL's latency nor other traffic.
"""

from __future__ import annotations

import argparse
from math import ceil, log2

from benchmarks.harness import Record, read_result
from benchmarks.markdown import pivot
from benchmarks.partition.lengths import LOGNORMAL
from benchmarks.partition.placements import RANKS_PER_NODE
from benchmarks.partition.plans_at_size import ACROSS_NODES, DEFAULT_NODES

RANKS = (64, 1024)
NODE_GBIT = 25.0  # bandwidth of a node's host network, which gloo uses for the gather
GPU_GBIT = ACROSS_NODES * 8 / 1e9  # bandwidth of each GPU's network, which the exchange uses


def add_up(ranks: int, node_gbit: float = NODE_GBIT, gpu_gbit: float = GPU_GBIT) -> dict[str, float]:
    """Returns the milliseconds of each part, for heavy-tailed lengths, 32 rows per rank, and nodes of 8."""
    sizes = read_result("partition")["plans_at_size"]
    [plan] = (each["ms"]["plan"] for each in sizes["plans"] if _is(each, ranks))
    [moves] = (each for each in sizes["moves"] if _is(each, ranks) and each["placement"] == DEFAULT_NODES)
    pair = next(each for each in read_result("plan_gather")["measured"] if each["ranks"] == 2)
    [exchange] = (
        each["cpu_ms"] for each in read_result("exchange_kernels")["batches"] if "HSTU" in each["batch"]
    )
    # Each process of a node receives the numbers of all ranks.
    gathered = pair["kilobytes_per_rank"] * 1e3 * ranks * RANKS_PER_NODE
    rounds = ceil(log2(ranks)) * pair["ms"]["channel"]["median"] + gathered * 8 / (node_gbit * 1e9) * 1e3
    wire = moves["us"] * GPU_GBIT / gpu_gbit / 1e3
    return {
        "gather, computed": rounds,
        "plan, measured": plan["median"],
        "hidden behind the step before": rounds + plan["median"],
        "host time of the exchange, measured": exchange["median"],
        "bytes ÷ bandwidth, computed": wire,
        "added to a step, without NCCL's latency": exchange["median"] + wire,
    }


def _is(record: Record, ranks: int) -> bool:
    return record["ranks"] == ranks and record["lengths"] == LOGNORMAL


def tables(**bandwidths: float) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    cells = [
        {"ranks": ranks, "part": part, "ms": ms}
        for ranks in RANKS
        for part, ms in add_up(ranks, **bandwidths).items()
    ]
    return {"stage cost": pivot(cells, {"per step": "{part}"}, "{ranks:,} GPUs", "{ms:.2g} ms")}


def main() -> None:
    """Prints the table for the bandwidths on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stage_cost", description=__doc__)
    parser.add_argument("--node-gbit", type=float, default=NODE_GBIT, help="host network of a node, Gbit/s")
    parser.add_argument("--gpu-gbit", type=float, default=GPU_GBIT, help="network of each GPU, Gbit/s")
    print(tables(**vars(parser.parse_args()))["stage cost"])


if __name__ == "__main__":
    main()
