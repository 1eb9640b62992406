"""The figures as Markdown tables."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import markdown_table
from commons.distributed import ShufflerSettings

Record = dict[str, Any]
SHORT_STEP_MS = 50  # as on a GPU


def all_tables(figures: Record) -> dict[str, str]:
    """By name; lines of Markdown."""
    return {
        "training": _training(figures["training"]),
        "features": _features(figures["features"]),
        "planning": _planning(figures["planning"]),
        "traffic": _traffic(figures["planning"]),
        "machine": _machine(figures),
    }


def tables_of_readme(figures: Record) -> dict[str, str]:
    """Returns what the stage costs by default, as part of a sentence."""
    arm = figures["training"]["arms"][f"all_to_all, {ShufflerSettings().partitioner}"]
    exposed, exchange, step = _exposed_ms(arm), arm["exchange_ms"]["median"], arm["step_ms"]["median"]
    return {
        "cost": f"{exposed:.1f} ms per step in the stage, {exchange:.1f} ms of it exchanging "
        f"{arm['kilobytes_sent']['median']:.0f} kB: {exposed / step:.1%} of a CPU step of {step:.0f} ms, but "
        f"{exposed / SHORT_STEP_MS:.0%} of one of {SHORT_STEP_MS} ms"
    }


def _training(training: Record) -> str:
    rows = [
        [
            name,
            f"{arm['imbalance']:.3f}",
            f"{arm['step_ms']['median']:.0f}",
            f"{arm['planning_ms']['median']:.2f}",
            f"{_exposed_ms(arm):.1f}",
            f"{arm['exchange_ms']['median']:.2f}",
            f"{arm['wait_ms']['median']:.3f}",
            f"{arm['kilobytes_sent']['median']:.0f}",
        ]
        for name, arm in training["arms"].items()
    ]
    return markdown_table(
        [
            "exchange, partitioner",
            "imbalance",
            "step, ms",
            "planning thread, ms",
            "exposed, ms",
            "exchange, ms",
            "wait for the plan, ms",
            "kB sent",
        ],
        rows,
    )


def _exposed_ms(arm: Record) -> float:
    """The median share of a step, of the median step."""
    return arm["exposed_share_of_step"]["median"] * arm["step_ms"]["median"]


def _features(by_ranks: Record) -> str:
    rows = [
        [
            f"{ranks}",
            f"{num_features}",
            name,
            f"{arm['stage_ms']['median']:.2f}",
            f"{arm['exposed_ms']['median']:.2f} ({arm['exposed_share_of_stage']['median']:.0%})",
            f"{sum(arm['collectives_per_step'].values()):.0f}",
            f"{arm['kilobytes_sent']['median']:.0f}",
            f"{arm['kilobytes_received']['median']:.0f}",
        ]
        for ranks, by_features in by_ranks.items()
        for num_features, arms in by_features.items()
        for name, arm in arms.items()
    ]
    return markdown_table(
        [
            "ranks",
            "features",
            "exchange, partitioner",
            "stage, ms",
            "exposed, ms",
            "collectives",
            "kB sent",
            "kB received",
        ],
        rows,
    )


def _planning(records: list[Record]) -> str:
    rows = [
        [
            record["lengths"],
            f"{record['ranks']}",
            *(f"{milliseconds:.2f}" for milliseconds in record["partition_ms"].values()),
        ]
        for record in records
    ]
    partitioners = [f"{name}, ms" for name in records[0]["partition_ms"]]
    return markdown_table(["lengths", "ranks", *partitioners], rows)


def _traffic(records: list[Record]) -> str:
    rows = []
    for record in records:
        gathered, sent = record["kilobytes_received_by_all_gather"], record["kilobytes_sent_per_rank"]
        rows.append(
            [
                record["lengths"],
                f"{record['ranks']}",
                f"{gathered:,.0f}",
                *(
                    f"{kilobytes:,.1f} (1/{gathered / max(kilobytes, 1e-9):,.0f})"
                    for kilobytes in sent.values()
                ),
            ]
        )
    titles = [f"all_to_all, {name}" for name in records[0]["kilobytes_sent_per_rank"]]
    return markdown_table(["lengths", "ranks", "all_gather", *titles], rows)


def _machine(figures: Record) -> str:
    machine, training = figures["machine"], figures["training"]
    return (
        f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}, gloo, one thread per rank; "
        f"medians, in training of {training['steps']} steps."
    )
