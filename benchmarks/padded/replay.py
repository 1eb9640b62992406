"""Replays eight ranks: the computation of each one's rows by itself, one after another, in CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.harness import Record, list_cases, measure_cases, run_on_ranks, take_turns, time_ms
from benchmarks.markdown import Cell, make_table
from benchmarks.padded.lengths import KINDS, load_rows
from benchmarks.padded.model import OPTIMIZER, PaddedModel, count_flops, make_batch
from benchmarks.padded.training import AS_LOADED, DEFAULT, PADDED, draw_lengths
from benchmarks.partition.placements import ROWS_PER_RANK
from commons.distributed import ShufflePlan, ShufflerSettings
from commons.distributed.placement import place, place_at_home
from commons.distributed.plan import RowTable
from commons.extensions.padded.padded_plan import plan_padded
from commons.sequence_batch import BaseBatch
from commons.training import shard_model

RANKS, STEPS = 8, 5
PASSES = 2  # of each rank's rows; the faster one counts
PLANS: dict[str, Callable[[RowTable], ShufflePlan]] = {
    AS_LOADED: place_at_home,
    DEFAULT: lambda rows: place(rows, ShufflerSettings()),
    PADDED: plan_padded,
}


def measure_replay(steps: int = STEPS) -> list[Record]:
    """Returns a record for each kind of lengths."""
    return run_on_ranks(1, replay, str(steps))


def replay(device: torch.device, steps: str) -> list[Record]:
    """Replays the ranks in this process, and returns a record for each kind of lengths."""
    torch.manual_seed(0)
    model, _ = shard_model(PaddedModel(), OPTIMIZER, device)
    return measure_cases(list_cases(lengths=KINDS), partial(_replay, model, int(steps)), "replay")


def _replay(model: torch.nn.Module, num_steps: int, lengths: str) -> Record:
    """Returns the seconds of each arm, `[step][rank]`, and the speedup that plans predict."""
    drawn = draw_lengths(lengths, num_steps * RANKS * ROWS_PER_RANK)
    steps = list(np.arange(len(drawn)).reshape(num_steps, -1))
    seconds: dict[str, list[list[float]]] = {name: [] for name in PLANS}
    _time_pass(model, make_batch(drawn, steps[0][:ROWS_PER_RANK]))  # warms up
    for name in take_turns(PLANS, num_steps):
        numbers = steps[len(seconds[name])]
        plan = PLANS[name](_load(drawn[numbers]))
        parts = [make_batch(drawn, numbers[plan.computed_by(rank)]) for rank in range(RANKS)]
        seconds[name].append([min(_time_pass(model, part) for _ in range(PASSES)) for part in parts])
    plans = [plan_padded(_load(drawn[numbers])) for numbers in steps]
    before, after = (sum(getattr(plan, of).max() for plan in plans) for of in ("loads_before", "loads"))
    return {"seconds": seconds, "speedup_predicted": round(before / after, 4)}


def _time_pass(model: torch.nn.Module, batch: BaseBatch) -> float:
    """Returns the CPU seconds of one forward and backward pass."""
    model.zero_grad()
    return round(time_ms(lambda: model(batch)[0].backward(), time.process_time) / 1e3, 5)


def _load(lengths: np.ndarray) -> RowTable:
    return load_rows(lengths, count_flops(lengths))


def tabulate_replay(figures: Sequence[Record]) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    columns: dict[str, Cell] = {"lengths": "{lengths}"}
    columns |= {f"{name} (waiting)": partial(_show_arm, name) for name in PLANS}
    columns |= {"speedup": _show_speedup, "predicted": "{speedup_predicted:.2f}"}
    steps = len(figures[0]["seconds"][PADDED])
    return {"padded replay": make_table(figures, columns), "padded replayed steps": str(steps)}


def _show_arm(name: str, record: Record) -> str:
    return "{seconds:.1f} s ({waiting:.0%})".format_map(_summarize(record["seconds"][name]))


def _summarize(seconds: list[list[float]]) -> Record:
    """Returns the time of all steps, each as long as its slowest rank, and the share that ranks wait."""
    times = np.array(seconds)
    slowest = times.max(1).sum()
    return {"seconds": slowest, "waiting": 1 - times.mean(1).sum() / slowest}


def _show_speedup(record: Record) -> str:
    before, after = (_summarize(record["seconds"][name])["seconds"] for name in (AS_LOADED, PADDED))
    return f"{before / after:.2f}"
