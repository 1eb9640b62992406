"""Times what each of 8 ranks would compute, one after the other on this machine, under several placements.

Pieces of samples compute on keys and values that are zeros, in place of those that ranks would fetch.
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
from commons.distributed import BatchShuffler, ShufflePlan
from commons.distributed.cutting import Cutting
from commons.distributed.key_fetch import KeyFetch, PlacedPieces
from commons.distributed.placement import place
from commons.distributed.sample_facts import SampleFacts, loaded_samples
from commons.gin_values import from_gin
from commons.perf_model import Cost
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, shard_model

RANKS, STEPS = 8, 5


def replay(name: str, learned_cost: Path) -> Record:
    """Times one forward and backward of each rank's batch.

    Args:
        name: of the model.
        learned_cost: file of what the training has learned, for the arm that balances by it.

    Returns:
        "replay": seconds by arm, `[step][rank]`.
    """
    make_task = parse_config(name, long_histories=True)
    with rank_process() as device:
        args = from_gin(TrainerArgs)
        args.train_batch_size *= RANKS  # one process loads for all the ranks that it replays
        task = make_task(args, device)
        steps = list(_place_steps(task, args, learned_cost))
        model, _ = shard_model(task.model, from_gin(OptimizerArgs), device)
        model.train()
        _time(model, steps[0][1][0].to(device))  # warms up
        seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        with mock.patch.object(KeyFetch, "all_to_all", _receive_zeros):
            for arm, batches in show_progress(steps, f"replay {RANKS} ranks"):
                seconds[arm].append([_time(model, batch.to(device)) for batch in batches])
    return {"replay": seconds}


def _place_steps(
    task: TrainingTask, args: TrainerArgs, learned_cost: Path
) -> Iterator[tuple[str, list[BaseBatch]]]:
    """Yields the arm and each rank's batch, step by step."""
    learned = {"balance_cost": str(learned_cost)}
    shufflers = {
        arm: task.make_shuffler(replace(args, **settings | (learned if arm == LEARNED_PIECES else {})))
        for arm, settings in ARMS.items()
    }
    for batch in islice(task.train_dataset, STEPS):
        for arm, shuffler in shufflers.items():
            if arm == AS_LOADED:
                yield arm, [batch.index_select(part) for part in np.split(np.arange(batch.batch_size), RANKS)]
            else:
                yield arm, place_rows(batch, shuffler, RANKS)


def place_rows(batch: BaseBatch, shuffler: BatchShuffler, num_ranks: int) -> list[BaseBatch]:
    """Returns each rank's batch after the stage, where ranks have loaded consecutive rows of `batch`."""
    facts = SampleFacts.of(
        batch,
        shuffler.sample_rows,
        {
            "workloads": shuffler.get_workloads,
            "tokens": shuffler.get_tokens,
            "loss tokens": shuffler.get_loss_tokens,
        },
    )
    sizes = np.full(num_ranks, batch.batch_size // num_ranks)
    samples = loaded_samples(facts.per_sample, sizes, sizes, facts.schema, facts.columns)
    count_names = facts.columns.count_names
    cost = Cost.sum_of_columns(facts.columns.work)
    if isinstance(shuffler.cost, Cost):
        cost = shuffler.cost
    cutting = None
    if shuffler.settings.split:
        rules = batch.cut_rules()
        if rules is None:
            raise TypeError(f"a {type(batch).__name__} cannot be cut")
        cutting = Cutting(rules, facts.schema, count_names, shuffler.prefix_cost, cost)
    plan = place(samples.with_cost(cost), shuffler.settings, cutting=cutting)
    return [_take_rank(batch, plan, rank, count_names) for rank in range(num_ranks)]


def _take_rank(batch: BaseBatch, plan: ShufflePlan, rank: int, count_names: Sequence[str]) -> BaseBatch:
    """Returns a rank's batch after the exchange."""
    own = plan.computed_by(rank)
    part = batch if plan.pieces is None else batch.cut_by(plan.pieces, plan.sample_of)
    counts = dict(zip(count_names, plan.row_counts[own].T, strict=True))
    part = part.index_select(own).with_row_counts(counts)
    if plan.pieces is None:
        return part
    group: Any = SimpleNamespace(num_ranks=plan.num_ranks, rank=rank, fetch_group=lambda device: None)
    return part.with_pieces(PlacedPieces(plan, group, count_names))


def _receive_zeros(fetch: KeyFetch, received: torch.Tensor, *_: Any) -> Any:
    """Takes the place of `KeyFetch.all_to_all`."""
    received.zero_()
    return SimpleNamespace(wait=lambda: None)


def _time(model: torch.nn.Module, batch: BaseBatch) -> float:
    """Returns the seconds of forward and backward."""
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
