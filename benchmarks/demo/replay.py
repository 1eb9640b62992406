"""Times the computation of 8 ranks, one after another on this machine, under several placements.

Pieces compute on zeros in place of the keys and values that ranks would fetch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.demo.training import ARMS, AS_LOADED, LEARNED_PIECES, parse_config
from benchmarks.harness import Record, show_progress
from commons.datasets.gin_values import from_gin
from commons.distributed import BatchShuffler, ShufflePlan
from commons.distributed.counting import count_rows
from commons.distributed.placement import arguments_of, make_plan, place
from commons.extensions.pieces import Pieces
from commons.extensions.pieces.cut_batch import cut_rows
from commons.extensions.pieces.cut_search import cut_and_place
from commons.extensions.pieces.cutting import COLUMN, Cutting
from commons.extensions.pieces.key_fetch import KeyFetch, PlacedPieces
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.rows import Rows
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, shard_model

RANKS, STEPS = 8, 5


def replay(name: str, arms: Sequence[str], learned_cost: Path) -> Record:
    """Times one forward and backward pass of each rank's batch.

    Args:
        name: name of the model.
        arms: names of the arms to replay.
        learned_cost: file with the costs that training learned, for the arm that balances by them.

    Returns:
        A record with "replay": the seconds of each arm, `[step][rank]`.
    """
    make_task = parse_config(name, long_histories=True)
    with rank_process() as device:
        args = from_gin(TrainerArgs)
        args.train_batch_size *= RANKS  # one process loads for all the ranks that it replays
        task = make_task(args, device)
        steps = list(_place_steps(task, args, arms, learned_cost))
        model, _ = shard_model(task.model, from_gin(OptimizerArgs), device)
        model.train()
        _time(model, steps[0][1][0].to(device))  # warms up
        seconds: dict[str, list[list[float]]] = {arm: [] for arm in arms}
        with mock.patch.object(KeyFetch, "all_to_all", _receive_zeros):
            for arm, batches in show_progress(steps, f"replay {RANKS} ranks"):
                seconds[arm].append([_time(model, batch.to(device)) for batch in batches])
    return {"replay": seconds}


def _place_steps(
    task: TrainingTask, args: TrainerArgs, arms: Sequence[str], learned_cost: Path
) -> Iterator[tuple[str, list[BaseBatch]]]:
    """Yields each arm and its ranks' batches, step by step."""
    learned = {"balance_cost": str(learned_cost)}
    shufflers = {
        arm: task.make_shuffler(replace(args, **ARMS[arm] | (learned if arm == LEARNED_PIECES else {})))
        for arm in arms
    }
    for batch in islice(task.train_dataset, STEPS):
        for arm, shuffler in shufflers.items():
            if arm == AS_LOADED:
                yield arm, [batch.index_select(part) for part in np.split(np.arange(batch.batch_size), RANKS)]
            else:
                yield arm, place_rows(batch, shuffler, RANKS)


def place_rows(batch: BaseBatch, shuffler: BatchShuffler, num_ranks: int) -> list[BaseBatch]:
    """Returns each rank's batch after the stage, if the ranks have loaded consecutive rows of `batch`."""
    count = {
        "workloads": lambda rows: shuffler.get_workloads(rows.batch),
        "tokens": lambda rows: shuffler.get_tokens(rows.batch),
        "loss tokens": lambda rows: shuffler.get_loss_tokens(rows.batch),
    }
    counted = count_rows(shuffler.view(batch), count, [])
    each = batch.batch_size // num_ranks
    messages = np.zeros(num_ranks, dtype=counted.format.message(np.dtype([]), each))
    messages["num_rows"] = messages["num_real"] = each
    messages["rows"] = counted.numbers.reshape(num_ranks, each)
    rows = replace(counted.format.table(messages), arguments=arguments_of(shuffler.extensions))
    if shuffler.cost is not None:
        rows = rows.with_cost(shuffler.cost)
    if any(isinstance(extension, Pieces) for extension in shuffler.extensions):
        rules = shuffler.cut_rules(batch)
        known = counted.format
        cutting = Cutting(rules, known.schema, known.count_names, shuffler.prefix_cost, rows.cost)
        plan = make_plan(*cut_and_place(rows, shuffler.settings, cutting))
        if COLUMN in plan.rows.columns:
            cut = cut_rows(Rows(batch), plan.rows.columns[COLUMN], rules)
            batch = cut.batch
    else:
        plan = place(rows, shuffler.settings)
    return [_take_rank(batch, plan, rank) for rank in range(num_ranks)]


def _take_rank(batch: BaseBatch, plan: ShufflePlan, rank: int) -> BaseBatch:
    """Returns a rank's rows of a batch that is already cut as planned."""
    own = plan.computed_by(rank)
    assert plan.rows.format is not None  # the rows were counted
    counts = plan.rows.format.row_counts(plan.rows, own)
    part: BaseBatch = Rows(batch.index_select(own)).with_counts(counts).batch
    if COLUMN not in plan.rows.columns:
        return part
    group: Any = SimpleNamespace(
        num_ranks=plan.num_ranks, rank=rank, group_for=lambda use, device: None, wait_seconds=0.0
    )
    part.pieces = PlacedPieces(plan, group)
    return part


def _receive_zeros(fetch: KeyFetch, received: torch.Tensor, *_: Any) -> Any:
    """Stands in for `KeyFetch.all_to_all`, and fills `received` with zeros."""
    received.zero_()
    return SimpleNamespace(wait=lambda: None)


def _time(model: torch.nn.Module, batch: BaseBatch) -> float:
    """Returns the seconds of one forward and backward pass."""
    model.zero_grad()
    _wait_for_gpu()
    start = time.perf_counter()
    loss, _ = model(batch)
    loss.backward()
    _wait_for_gpu()
    return time.perf_counter() - start


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
