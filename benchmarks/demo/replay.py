"""Times what each of 8 ranks would compute, one after the other on this machine, under several placements.

Pieces of samples compute on keys and values that are zeros, in place of those that ranks would fetch.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.demo.models import parse_config
from benchmarks.demo.training import ARMS, AS_LOADED
from commons.distributed import BatchShuffler
from commons.distributed.cutting import Cutting
from commons.distributed.key_fetch import KeyFetch, PlacedPieces
from commons.distributed.placement import place
from commons.distributed.sample_facts import SampleFacts, loaded_samples
from commons.gin_values import from_gin
from commons.sequence_batch import BaseBatch
from commons.training import OptimizerArgs, TrainerArgs, TrainingTask, rank_process, shard_model

RANKS, STEPS = 8, 5


def replay(name: str) -> dict[str, list[list[float]]]:
    """Seconds of one forward and backward of each batch, by arm, `[step][rank]`."""
    make_task = parse_config(name, long_histories=True)
    with rank_process() as device:
        args = from_gin(TrainerArgs)
        args.train_batch_size *= RANKS  # one process loads for all the ranks that it replays
        task = make_task(args, device)
        batches = _placed_batches(task, args)
        model, _ = shard_model(task.model, from_gin(OptimizerArgs), device)
        model.train()
        _seconds(model, batches[0][1].to(device))  # warms up
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        with mock.patch.object(KeyFetch, "all_to_all", _zeros):
            for arm, batch in tqdm(batches, desc=f"replay {RANKS} ranks", unit="batch"):
                seconds[arm].append(_seconds(model, batch.to(device)))
    return {arm: np.reshape(of_arm, (STEPS, RANKS)).tolist() for arm, of_arm in seconds.items()}


def _placed_batches(task: TrainingTask, args: TrainerArgs) -> list[tuple[str, BaseBatch]]:
    """The arm, and one rank's batch under it, step by step and rank by rank."""
    placed = []
    global_batches = iter(task.train_dataset)
    shufflers = {arm: task.make_shuffler(replace(args, **settings)) for arm, settings in ARMS.items()}
    for _ in range(STEPS):
        batch = next(global_batches)
        for arm, shuffler in shufflers.items():
            parts = (
                [batch.index_select(part) for part in np.split(np.arange(batch.batch_size), RANKS)]
                if arm == AS_LOADED
                else place_rows(batch, shuffler, RANKS)
            )
            placed += [(arm, part) for part in parts]
    return placed


def place_rows(batch: BaseBatch, shuffler: BatchShuffler, num_ranks: int) -> list[BaseBatch]:
    """Returns each rank's batch as the stage would, where ranks have loaded consecutive rows of `batch`."""
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
    samples = loaded_samples(facts.per_sample, sizes, sizes, facts.schema, facts.count_names)
    cutting = None
    if shuffler.settings.split:
        rules = batch.cut_rules()
        if rules is None:
            raise TypeError(f"a {type(batch).__name__} cannot be cut")
        cutting = Cutting(rules, facts.schema, facts.count_names, shuffler.prefix_cost)
    plan = place(samples, shuffler.settings, cutting=cutting)
    parts = []
    for rank in range(num_ranks):
        own = plan.computed_by(rank)
        part = batch
        if plan.pieces is not None:
            part = batch.cut_by(plan.pieces, plan.sample_of)
        counts = dict(zip(facts.count_names, plan.row_counts[own].T, strict=True))
        part = part.index_select(own).with_row_counts(counts)
        if plan.pieces is not None:
            group: Any = SimpleNamespace(num_ranks=num_ranks, rank=rank, fetch_group=lambda device: None)
            part = part.with_pieces(PlacedPieces(plan, group, facts.count_names))
        parts.append(part)
    return parts


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
