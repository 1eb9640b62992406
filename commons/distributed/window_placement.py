"""From what was gathered of all ranks' samples to the plan of each step."""

from __future__ import annotations

import numpy as np

from commons.distributed.placement import LoadedSamples, Placement
from commons.distributed.plan_gather import GatheredFacts
from commons.distributed.rank_group import RankGroup
from commons.distributed.shuffle_plan import ShufflePlan, WindowPlan


def divided(plan: ShufflePlan, placement: Placement) -> ShufflePlan:
    """A plan in micro-batches, if the placement asks for any."""
    if placement.max_tokens_per_micro_batch is None:
        return plan
    return plan.in_micro_batches(
        placement.divide_into_micro_batches(plan.workloads, plan.tokens, plan.partition)
    )


def placed_window(gathered: GatheredFacts, placement: Placement, group: RankGroup) -> WindowPlan:
    """Places the samples of a window, of which at least one rank has a batch.

    Raises:
        ValueError: the placement's limits cannot be kept.
    """
    batch_sizes, num_loaded = gathered.batch_sizes.sum(1), gathered.num_loaded.sum(1)
    num_steps = int(gathered.batch_sizes.any(0).sum())
    sample_bytes = gathered.schema.row_bytes(gathered.num_elements)
    loaded = LoadedSamples(gathered.workloads, gathered.tokens, sample_bytes, batch_sizes, num_loaded)
    micro_batches = None
    if num_steps == 1 and placement.max_tokens_per_micro_batch is not None:
        micro_batches = placement.place_in_micro_batches(loaded, group.ranks_per_node)
        partitions = [[np.sort(np.concatenate(of_rank)) for of_rank in micro_batches]]
    elif num_steps == 1:
        partitions = [placement.place(loaded, group.ranks_per_node)]
    elif group.num_ranks == 1:  # a rank alone waits for none
        ends = np.cumsum(gathered.num_loaded[0])[:num_steps]
        partitions = [[part] for part in np.split(np.arange(ends[-1]), ends[:-1])]
    else:
        partitions = placement.place_window(loaded, num_steps)
    home = np.repeat(np.arange(group.num_ranks), num_loaded)
    steps, samples_of_steps = [], []
    for step, partition in enumerate(partitions):
        samples = np.sort(np.concatenate(partition))
        brought = np.bincount(home[samples], minlength=group.num_ranks)
        # Where nothing moves between steps, a rank brings its batches as they were loaded, padding and all.
        as_loaded = num_steps == 1 or group.num_ranks == 1
        rows_brought = gathered.batch_sizes[:, step] if as_loaded else brought
        rows = placement.rows(int(batch_sizes.sum()), num_steps, partition, gathered.pads)
        plan = ShufflePlan(
            batch_sizes=rows_brought,
            num_loaded=brought,
            workloads=gathered.workloads[samples],
            tokens=gathered.tokens[samples],
            loss_tokens=gathered.loss_tokens[samples],
            num_elements=gathered.num_elements[samples],
            sample_bytes=sample_bytes[samples],
            partition=tuple(np.searchsorted(samples, part) for part in partition),
            rows=rows_brought if group.num_ranks == 1 else rows,
        )
        steps.append(
            divided(plan, placement) if micro_batches is None else plan.in_micro_batches(micro_batches)
        )
        samples_of_steps.append(samples)
    return WindowPlan(
        batch_sizes=gathered.batch_sizes,
        num_loaded=gathered.num_loaded,
        steps=tuple(steps),
        samples=tuple(samples_of_steps),
        workloads=gathered.workloads,
        tokens=gathered.tokens,
    )
