"""Compares the partition functions of verl, slime, and AReaL with ours: balance, micro-batches, and time.

Their code comes from checkouts. Only the files with these functions are read.
"""

from __future__ import annotations
import __future__ as future

import ast
import logging
import statistics
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Record, average, machine, take_turns, time_call
from benchmarks.markdown import make_table, markdown_table
from commons.extensions.micro_batches import pack_micro_batches
from commons.partition import imbalance, loads, lower_bound, refined
from commons.perf_model import TransformerConfig, transformer_flops

# The file with the functions in each checkout, by the checkout's folder.
FILES = {
    "verl": "verl/utils/seqlen_balancing.py",
    "slime": "slime/utils/seqlen_balancing.py",
    "AReaL": "areal/utils/seqpack.py",
}
SOURCES = "compared-with-others.md#trainers-of-language-models"
DIFFERENCING = "get_seqlen_balanced_partitions"  # in verl and slime
# A decoder with 7 billion parameters, and the distribution of its responses' lengths in tokens.
MODEL = TransformerConfig(28, 3584, 28, 4, 128, 18944, gated_mlp=True, vocab_size=152_064)
MEDIAN, SIGMA, LONGEST = 2000, 1.0, 32_768
RANKS, ROWS_PER_RANK, DRAWS = (8, 64, 256), 32, 20
SAMPLES, MAX_TOKENS = 128, 32_768  # for packing one rank's micro-batches

Sequences = tuple[list[int], list[int]]  # workloads, tokens
Parts = list[list[int]]
Partition = Callable[[Sequences], Parts]


def measure(checkouts: str) -> Record:
    """Returns the figures of all functions. `checkouts` is a folder with `verl`, `slime`, and `AReaL`."""
    folder = Path(checkouts)
    verl, slime, areal = (_load(folder / name / file) for name, file in FILES.items())
    placements: dict[str, Callable[..., Parts]] = {
        "verl, Karmarkar–Karp": lambda s, num_parts: verl[DIFFERENCING](s[0], num_parts, True),
        "slime, Karmarkar–Karp": lambda s, num_parts: slime[DIFFERENCING](s[0], num_parts, True),
        "AReaL, greedy": lambda s, num_parts: areal["balanced_greedy_partition"](s[0], num_parts),
        "ours, `refined`": lambda s, num_parts: refined(s[0], num_parts),
    }
    packings: dict[str, Partition] = {
        "verl, Karmarkar–Karp by FLOPs": lambda s: verl[DIFFERENCING](
            s[0], -(-sum(s[1]) // MAX_TOKENS), False
        ),
        "slime, first fit": lambda s: slime["first_fit_pack"](s[1], MAX_TOKENS),
        "AReaL, first fit decreasing": lambda s: areal["ffd_allocate"](s[1], MAX_TOKENS, 1),
        "AReaL, Karmarkar–Karp": lambda s: areal["kk_allocate"](s[1], MAX_TOKENS, 1),
        "ours, `pack_micro_batches`": lambda s: pack_micro_batches(*s, MAX_TOKENS),
    }
    return {
        "commits": {name: _read_commit(folder / name) for name in FILES},
        "placements": [
            {
                "ranks": ranks,
                "functions": _compare(
                    {name: partial(place, num_parts=ranks) for name, place in placements.items()},
                    ROWS_PER_RANK * ranks,
                    _rate_placement,
                    f"{ranks} ranks",
                ),
            }
            for ranks in RANKS
        ],
        "packings": _compare(packings, SAMPLES, _rate_packing, "micro-batches"),
        "machine": machine(),
    }


def _load(file: Path) -> dict[str, Any]:
    """Returns the names that a file defines. Skips imports and assignments that need missing packages."""
    names: dict[str, Any] = {"__name__": file.stem, "logger": logging.getLogger(file.stem)}
    for node in ast.parse(file.read_text()).body:
        module = ast.Module([node], type_ignores=[])
        flags = future.annotations.compiler_flag
        try:
            exec(compile(module, str(file), "exec", flags=flags, dont_inherit=True), names)
        except (ImportError, NameError):
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Assign):
                raise
    return names


def _read_commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=9", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _draw(rng: np.random.Generator, count: int) -> Sequences:
    tokens = np.rint(rng.lognormal(np.log(MEDIAN), SIGMA, count).clip(1, LONGEST)).astype(np.int64)
    return np.asarray(transformer_flops(MODEL, tokens)).tolist(), tokens.tolist()


def _compare(
    functions: Mapping[str, Partition], count: int, rate: Callable[[Sequences, Parts], Record], what: str
) -> list[Record]:
    """Returns each function's mean figures over draws of `count` samples, and its median time in ms."""
    rng = np.random.default_rng(0)
    drawn = [_draw(rng, count) for _ in range(DRAWS)]
    rated: dict[str, list[Record]] = {name: [] for name in functions}
    times: dict[str, list[float]] = {name: [] for name in functions}
    draws = {name: iter([drawn[0], *drawn]) for name in functions}
    for name in take_turns(functions, DRAWS + 1, what):
        sequences = next(draws[name])
        parts, taken = time_call(partial(functions[name], sequences))
        rated[name].append(rate(sequences, parts))
        times[name].append(taken)
    return [
        {"function": name, **average(rated[name][1:]), "ms": round(statistics.median(times[name][1:]), 3)}
        for name in functions  # each function's first call warms up
    ]


def _rate_placement(sequences: Sequences, parts: Parts) -> Record:
    bound = lower_bound(sequences[0], len(parts))
    return {"imbalance": imbalance(sequences[0], parts), "bound": bound}


def _rate_packing(sequences: Sequences, parts: Parts) -> Record:
    work, tokens = sequences
    return {
        "micro_batches": len(parts),
        "imbalance": imbalance(work, parts),
        "above_cap": sum(map(int, loads(tokens, parts) > MAX_TOKENS)),
    }


def _link(record: Record) -> str:
    """Returns a function's name. The names of other trainers' functions link to their sources."""
    trainer, comma, function = record["function"].partition(",")
    return f"[{trainer}]({SOURCES}){comma}{function}" if trainer in FILES else record["function"]


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    by_ranks = {each["ranks"]: each["functions"] for each in figures["placements"]}
    first = next(iter(by_ranks.values()))
    rows = [
        [_link(record)]
        + [f"{found[number]['imbalance']:.3f}, {found[number]['ms']:.3g} ms" for found in by_ranks.values()]
        for number, record in enumerate(first)
    ]
    rows.append(["bound", *[f"{found[0]['bound']:.3f}" for found in by_ranks.values()]])
    packing = {
        "one rank's micro-batches": _link,
        "micro-batches": "{micro_batches:.1f}",
        "above the cap": "{above_cap:.1f}",
        "imbalance": "{imbalance:.3f}",
        "ms": "{ms:.3g}",
    }
    return {
        "controllers placements": markdown_table(
            ["equal sizes", *[f"{ranks} ranks" for ranks in by_ranks]], rows
        ),
        "controllers packings": make_table(figures["packings"], packing),
        "controllers commits": ", ".join(f"{name} {commit}" for name, commit in figures["commits"].items()),
    }
