"""Times what each of 8 ranks would compute, one after the other on this machine, under several placements.

Pieces of samples compute on keys and values that are zeros, in place of those that ranks would fetch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.demo.training import ARMS, AS_LOADED, LEARNED_PIECES, PIECES, parse_config
from benchmarks.harness import Record, progress
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
    """Times the batches of all arms, and pieces by themselves.

    Args:
        name: of the model.
        learned_cost: file of what the training has learned, for the arm that balances by it.

    Returns:
        "replay": seconds of one forward and backward of each batch, by arm, `[step][rank]`; and "pieces": by
        arm that cuts samples, what `_piece_figures` returns.
    """
    make_task = parse_config(name, long_histories=True)
    with rank_process() as device:
        args = from_gin(TrainerArgs)
        args.train_batch_size *= RANKS  # one process loads for all the ranks that it replays
        task = make_task(args, device)
        steps = list(_placed_steps(task, args, learned_cost))
        model, _ = shard_model(task.model, from_gin(OptimizerArgs), device)
        model.train()
        _seconds(model, steps[0][1].batches[0].to(device))  # warms up
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        with mock.patch.object(KeyFetch, "all_to_all", _zeros):
            for arm, step in progress(steps, f"replay {RANKS} ranks"):
                seconds[arm] += [_seconds(model, batch.to(device)) for batch in step.batches]
            pieces = {
                arm: _piece_figures(model, device, steps, arm, seconds[arm])
                for arm in (PIECES, LEARNED_PIECES)
            }
    replayed = {arm: np.reshape(of_arm, (STEPS, RANKS)).tolist() for arm, of_arm in seconds.items()}
    return {"replay": replayed, "pieces": pieces}


@dataclass(frozen=True)
class PlacedStep:
    """A global batch as an arm places it.

    Attributes:
        batch: the global batch, as loaded.
        plan: of its rows; None as loaded.
        count_names: of its `row_counts`.
        batches: of each rank.
    """

    batch: BaseBatch
    plan: ShufflePlan | None
    count_names: Sequence[str]
    batches: list[BaseBatch]


def _placed_steps(
    task: TrainingTask, args: TrainerArgs, learned_cost: Path
) -> Iterator[tuple[str, PlacedStep]]:
    """Yields the arm and each of its steps, step by step."""
    learned = {"balance_cost": str(learned_cost)}
    shufflers = {
        arm: task.make_shuffler(replace(args, **settings | (learned if arm == LEARNED_PIECES else {})))
        for arm, settings in ARMS.items()
    }
    for batch in islice(task.train_dataset, STEPS):
        for arm, shuffler in shufflers.items():
            if arm == AS_LOADED:
                parts = np.split(np.arange(batch.batch_size), RANKS)
                yield arm, PlacedStep(batch, None, (), [batch.index_select(part) for part in parts])
            else:
                yield arm, place_rows(batch, shuffler, RANKS)


def place_rows(batch: BaseBatch, shuffler: BatchShuffler, num_ranks: int) -> PlacedStep:
    """Returns a step as the stage places it, where ranks have loaded consecutive rows of `batch`."""
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
    parts = [_batch_of(batch, plan, rank, count_names) for rank in range(num_ranks)]
    return PlacedStep(batch, plan, count_names, parts)


def _batch_of(batch: BaseBatch, plan: ShufflePlan, rank: int, count_names: Sequence[str]) -> BaseBatch:
    """Returns a rank's batch after the exchange."""
    own = plan.computed_by(rank)
    part = batch if plan.pieces is None else batch.cut_by(plan.pieces, plan.sample_of)
    counts = dict(zip(count_names, plan.row_counts[own].T, strict=True))
    part = part.index_select(own).with_row_counts(counts)
    if plan.pieces is None:
        return part
    group: Any = SimpleNamespace(num_ranks=plan.num_ranks, rank=rank, fetch_group=lambda device: None)
    return part.with_pieces(PlacedPieces(plan, group, count_names))


def _piece_figures(
    model: torch.nn.Module,
    device: torch.device,
    steps: Sequence[tuple[str, PlacedStep]],
    arm: str,
    rank_seconds: Sequence[float],
) -> dict[str, Any]:
    """Returns predicted ÷ measured time of the first and of the last pieces of samples, each timed alone.

    Predictions are in proportion to the arm's costs, at the median rate of its ranks' batches. From all times
    that of the shortest sample is subtracted, which is what any batch takes.

    Args:
        model, device: to time on.
        steps: of all arms.
        arm: whose pieces to time.
        rank_seconds: of its batches, step by step and rank by rank.
    """
    placed = [step for of_arm, step in steps if of_arm == arm]
    loads = np.concatenate([step.plan.loads for step in placed if step.plan is not None])
    first = placed[0].batch
    shortest = first.index_select(first.num_tokens()[: first.num_samples].argmin()[None]).to(device)
    fixed = min(_seconds(model, shortest) for _ in range(5))
    per_second = float(np.median(loads / (np.array(rank_seconds) - fixed)))
    ratios: dict[str, list[float]] = {"early": [], "late": []}
    for step in placed:
        plan = step.plan
        if plan is None or plan.pieces is None:
            continue
        is_cut = (np.bincount(plan.sample_of) > 1)[plan.sample_of]
        ends = np.append(plan.starts_sample[1:], True)
        for name, rows in (("early", plan.starts_sample & is_cut), ("late", ends & is_cut)):
            for row in np.flatnonzero(rows):
                # Alone on rank 0, with all other rows of the step elsewhere.
                ranks = (np.arange(len(plan.tokens)) != row).astype(np.int64)
                rows_of = np.maximum(np.bincount(ranks, minlength=plan.num_ranks), 1)
                alone = replace(plan, destination=ranks, rows=rows_of)
                batch = _batch_of(step.batch, alone, 0, step.count_names).to(device)
                measured = min(_seconds(model, batch) for _ in range(2)) - fixed
                ratios[name].append(plan.workloads[row] / per_second / measured)
    return {
        name: {"pieces": len(of_pieces), "predicted_over_measured": float(np.median(of_pieces))}
        for name, of_pieces in ratios.items()
    }


def _zeros(fetch: KeyFetch, received: torch.Tensor, *_: Any) -> Any:
    """Takes the place of `KeyFetch.all_to_all`."""
    received.zero_()
    return SimpleNamespace(wait=lambda: None)


def _seconds(model: torch.nn.Module, batch: BaseBatch) -> float:
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
