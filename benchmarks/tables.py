"""Writes the tables between markers on all pages, from the committed results: `make tables`."""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import importlib
from math import ceil, log2

from benchmarks import plan_gather, soak
from benchmarks.demo import table as demo
from benchmarks.harness import BENCHMARKS, Record, name_result, read_result
from benchmarks.markdown import pivot, write_pages
from benchmarks.partition.placements import LOGNORMAL, RANKS_PER_NODE
from benchmarks.partition.plans_at_size import DEFAULT_NODES
from ci import versions

NODE_GBIT = 25.0  # bandwidth of a node's host network, which gloo uses for the gather


def main() -> None:
    """Writes the pages, and prints the names of changed tables."""
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args()
    write_pages(all_tables())


def all_tables() -> dict[str, str]:
    """Returns the Markdown of all tables, by the name in their markers."""
    summaries = {model: read_result(f"demo/{model}/summary") for model in demo.TITLES}
    results = {name: read_result(name_result(name)) for name in BENCHMARKS} | {"soak": read_result("soak")}
    tables = {**demo.tables(summaries), "VERSIONS sets": versions.table(versions.read_outcomes())}
    tables |= soak.tables(results["soak"]) | {"stage cost": tabulate_stage_cost(results)}
    for name, module in BENCHMARKS.items():
        tables |= importlib.import_module(f"benchmarks.{module}").tables(results[name])
    on = "{cores} cores ({cpu}), torch {torch}"
    measured = [*summaries.values(), *results.values()]
    machines = {on.format(**each["machine"]) for each in measured if "machine" in each}
    return tables | {"benchmarks machine": "; ".join(sorted(machines))}


def tabulate_stage_cost(results: Record) -> str:
    """Returns a table of the stage's time in a step on many GPUs, from measured and counted parts."""
    cells = [
        {"ranks": ranks, "part": part, "ms": ms}
        for ranks in (64, 1024)
        for part, ms in add_up(results, ranks).items()
    ]
    return pivot(cells, {"per step": "{part}"}, "{ranks:,} GPUs", "{ms:.2g} ms")


def add_up(results: Record, ranks: int) -> dict[str, float]:
    """Returns the milliseconds of each part, for heavy-tailed lengths, 32 rows per rank, and nodes of 8.

    Network times are computed, and include neither NCCL's latency nor other traffic.
    """

    def is_case(record: Record) -> bool:
        return record["ranks"] == ranks and record["lengths"] == LOGNORMAL

    plan = next(each["ms"]["plan"] for each in results["plans"]["plans"] if is_case(each))
    moves = filter(is_case, results["plans"]["moves"])
    wire = next(each["us"] for each in moves if each["placement"] == DEFAULT_NODES) / 1e3
    pair = next(each for each in results["gather"]["measured"] if each["ranks"] == 2)
    batches = results["exchange-kernels"]["batches"]
    exchange = next(each["cpu_ms"] for each in batches if "HSTU" in each["batch"])
    # Each process of a node receives the numbers of all ranks.
    gathered = plan_gather.BYTES_PER_RANK * ranks * RANKS_PER_NODE
    rounds = ceil(log2(ranks)) * pair["ms"]["channel"]["median"] + gathered * 8 / (NODE_GBIT * 1e9) * 1e3
    return {
        "gather, computed": rounds,
        "plan, measured": plan["median"],
        "hidden behind the step before": rounds + plan["median"],
        "host time of the exchange, measured": exchange["median"],
        "bytes ÷ bandwidth, computed": wire,
        "added to a step, without NCCL's latency": exchange["median"] + wire,
    }


if __name__ == "__main__":
    main()
