"""Writes the tables between markers on all pages, from the committed results: `make tables`.

python -m benchmarks.tables
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import (
    attention,
    bucket_loading,
    first_plan,
    movielens_equivalence,
    plan_gather,
    recompute,
    token_tolerance,
)
from benchmarks.demo import table as demo
from benchmarks.learning import table as learning
from benchmarks.lookups import table as lookups
from benchmarks.markdown import filled, marked
from benchmarks.micro_batch import balance, memory
from benchmarks.partition import groups_at_size
from benchmarks.partition import table as partition
from benchmarks.shuffle import table as shuffle
from benchmarks.split_samples import planning, training
from ci import versions

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "benchmarks" / "README.md",
    *(REPOSITORY / "docs").glob("*.md"),
]


def main() -> None:
    """Writes the pages and prints what changed."""
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args()
    tables = all_tables()
    for page in PAGES:
        before = page.read_text()
        after = filled(before, tables)
        page.write_text(after)
        new = marked(after)
        for name, old in marked(before).items():
            if new[name] != old:
                print(f"{page.relative_to(REPOSITORY)}: {name}")


def all_tables() -> dict[str, str]:
    """Returns Markdown by the name in a table's markers."""
    split_samples, micro_batch = _result("split_samples"), _result("micro_batch")
    by_benchmark = {
        "demo": demo.all_tables({model: _result(f"demo/{model}/summary") for model in demo.TITLES}),
        "partition": partition.all_tables(_result("partition")),
        "readme": partition.tables_of_readme(_result("partition"))
        | shuffle.tables_of_readme(_result("shuffle")),
        "groups": groups_at_size.tables(_result("groups_at_size")),
        "shuffle": shuffle.all_tables(_result("shuffle")),
        "lookups": lookups.all_tables(_result("lookups")),
        "learning": learning.all_tables(_result("learning")),
        "first-plan": {"seconds": first_plan.make_table(_result("first_plan"))},
        "plan-gather": plan_gather.make_tables(_result("plan_gather")),
        "loading": {"balance": bucket_loading.make_table(_result("bucket_loading")["records"])},
        "attention": {"shares": attention.make_table(_result("attention")["records"])},
        "token-tolerance": token_tolerance.all_tables(_result("token_tolerance")),
        "recompute": {"memory and time": recompute.make_table(_result("recompute")["records"])},
        "micro-batch": balance.tables(micro_batch["balance"])
        | {"memory": memory.table(micro_batch["memory"])},
        "split-samples": training.tables(split_samples)
        | {"planning": planning.table(split_samples["planning"])},
        "movielens": {
            "AUC": movielens_equivalence.make_table(_result("movielens_equivalence")["auc_of_evaluations"])
        },
        "VERSIONS": {
            "sets": versions.table(versions.Outcome(**each) for each in _result("versions")["sets"])
        },
    }
    on_gpu = (RESULTS / "attention_gpu.json").exists()
    by_benchmark["attention_gpu"] = {
        "shares": attention.make_table(_result("attention_gpu")["records"]) if on_gpu else ""
    }
    return {
        f"{benchmark} {name}": table
        for benchmark, tables in by_benchmark.items()
        for name, table in tables.items()
    }


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    main()
