"""Draws training steps from the samples, and predicts each strategy's outcome on them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..distributed.placement import place, place_at_home
from ..distributed.plan import RowTable, ShufflePlan
from ..partition import lower_bound
from . import InputError
from .padding import PaddedModel, padded_model
from .pieces import PieceCosts, bytes_of_rows
from .samples import IdColumn, SampleCost
from .strategies import AS_LOADED, REBALANCE, Strategy

SEED = 0
# Fewer ranks get more steps, because their steps vary more and take less time to plan.
SAMPLES_TO_DRAW = 2**18
FEWEST_STEPS, MOST_STEPS = 32, 256
# Number of ids to count per strategy; sorting them takes under a second.
IDS_TO_COUNT = 2**22


@dataclass(frozen=True)
class Network:
    """The network between ranks.

    Attributes:
        bytes_per_second: bandwidth of one rank, in each direction.
        ranks_per_node: consecutive ranks per node, within which bytes take no time; None without nodes.
    """

    bytes_per_second: float
    ranks_per_node: int | None


@dataclass(frozen=True)
class DrawnSteps:
    """Steps as the ranks load them.

    Attributes:
        numbers, workloads, tokens, sizes: numbers of the samples in the data, their workloads, tokens, and
            bytes, int64 `[steps, ranks, rows]` each.
        num_epochs: number of epochs from which the steps were drawn.
        groups: groups of the samples, int64 `[steps, ranks, rows]`; None if unknown.
        ids: ids of each sample in the first steps, by the sample's number; None if unknown.
        num_with_ids: number of first steps in which ids are counted.
    """

    numbers: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray
    num_epochs: int
    groups: np.ndarray | None = None
    ids: dict[int, np.ndarray] | None = None
    num_with_ids: int = 0


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over steps. The deviation is None for a single step."""

    mean: float
    std: float | None

    @staticmethod
    def of(values: np.ndarray) -> Spread:
        """Returns the spread of values, float64 `[steps]`."""
        return Spread(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class UniqueIds:
    """Unique ids per rank, which looks up each of them once; entries of the JSON output.

    Attributes:
        steps: number of steps in which ids were counted.
        per_rank: unique ids of a rank, mean over ranks and steps.
        of_rank_with_most: unique ids of the rank with most, mean over steps.
        per_rank_relative, of_rank_with_most_relative: the previous two ÷ their values as loaded.
    """

    steps: int
    per_rank: float
    of_rank_with_most: float
    per_rank_relative: float
    of_rank_with_most_relative: float


@dataclass(frozen=True)
class Outcome:
    """One strategy's figures on the drawn steps; all but the first two are entries of the JSON output.

    Attributes:
        strategy: the strategy.
        loads: loads of the ranks, float64 `[steps, ranks]`.
        imbalance: largest ÷ mean load of a step.
        relative_time: sum of the largest loads ÷ sum of the mean loads; 1.0 is perfect.
        speedup: time of all steps as loaded ÷ their time with this strategy. Exchange and planning overlap a
            step, and nothing overlaps the fetch. Without times, all three count as 0.
        speedup_standard_error: standard error, from the variation among steps; None for a single step.
        speedup_exchange_not_hidden: the speedup if the exchange overlaps nothing; None without times.
        speedup_fetch_hidden: the speedup if computing overlaps all of the fetch; None without times.
        step_seconds: mean time of a step, which is the longest of three times: computing plus fetch,
            exchange, and planning. None without times.
        step_seconds_planning_hidden: `step_seconds` if planning took no time.
        exchange_seconds: exchange time of the slowest rank, mean over steps.
        bytes_sent_per_rank: bytes that a rank sends, mean over ranks and steps.
        bytes_of_slowest_rank: bytes of the rank that sends or receives most, mean over steps.
        share_of_bytes_across_nodes: share of moved bytes that leave their node; None without nodes.
        share_of_samples_moved: share of whole samples and pieces that leave the rank that loaded them.
        largest_tokens_per_rank: tokens of the rank with most, mean over steps.
        most_tokens_per_rank: most tokens of any rank in any step.
        samples_cut, pieces: numbers of cut samples and of their pieces, mean over steps.
        bytes_fetched_per_rank_and_layer: bytes of keys and values that a rank fetches per layer in forward,
            mean over ranks and steps.
        fetch_seconds: time of the slowest rank for the keys, values, and gradients of all layers, mean over
            steps.
        host_batches_per_rank: batches that a rank holds on the host, including the next one to copy.
        host_bytes_per_rank: bytes of these batches.
        planning_seconds_measured: median planning time per step, on this machine.
        planning_hidden: whether planning takes no longer than the steps it overlaps, so that no step waits
            for it; None without times.
        unique_ids: unique ids per rank; None, and no entry, if ids are unknown or samples are cut.
    """

    strategy: Strategy
    loads: np.ndarray
    imbalance: Spread
    relative_time: float
    speedup: float
    speedup_standard_error: float | None
    speedup_exchange_not_hidden: float | None
    speedup_fetch_hidden: float | None
    step_seconds: float | None
    step_seconds_planning_hidden: float | None
    exchange_seconds: float
    bytes_sent_per_rank: float
    bytes_of_slowest_rank: float
    share_of_bytes_across_nodes: float | None
    share_of_samples_moved: float
    largest_tokens_per_rank: float
    most_tokens_per_rank: int
    samples_cut: float
    pieces: float
    bytes_fetched_per_rank_and_layer: float
    fetch_seconds: float
    host_batches_per_rank: int
    host_bytes_per_rank: float
    planning_seconds_measured: float
    planning_hidden: bool | None
    unique_ids: UniqueIds | None


@dataclass(frozen=True)
class Case:
    """Figures for one number of ranks and rows; all but `outcomes` are entries of the JSON output.

    Attributes:
        ranks, rows_per_rank, steps_drawn, epochs_drawn: numbers of ranks, rows per rank, steps, and epochs.
        lower_bound: lower bound of a step's imbalance, which no placement of whole samples beats.
        mean_tokens_per_rank, bytes_loaded_per_rank: tokens and bytes per rank, mean over ranks and steps.
        all_gather_bytes_per_rank: bytes that a rank receives per step if all samples go to all ranks.
        padded_model: figures for a model that pads; None for a single rank, or without the extension.
        outcomes: outcome of each strategy by name, as loaded first.
    """

    ranks: int
    rows_per_rank: int
    steps_drawn: int
    epochs_drawn: int
    lower_bound: Spread
    mean_tokens_per_rank: float
    bytes_loaded_per_rank: float
    all_gather_bytes_per_rank: float
    padded_model: PaddedModel | None
    outcomes: dict[str, Outcome]


def draw_steps(
    workloads: np.ndarray,
    tokens: np.ndarray,
    sizes: np.ndarray,
    num_ranks: int,
    rows_per_rank: int,
    in_order: bool = False,
    groups: np.ndarray | None = None,
    ids: IdColumn | None = None,
) -> DrawnSteps:
    """Draws steps from epochs in random order, without replacement. Every run draws the same steps.

    Incomplete steps at the end of an epoch are left out.

    Args:
        workloads, tokens, sizes, groups: values of the samples, int64 `[samples]` each; sizes are in bytes.
        num_ranks, rows_per_rank: size of each step.
        in_order: whether to draw the steps of one epoch in the samples' own order instead. Each step is
            dealt to the ranks in contiguous runs.
        ids: ids of the samples; None if unknown.

    Raises:
        InputError: there are fewer samples than one step needs.
    """
    per_step = num_ranks * rows_per_rank
    if per_step > len(workloads):
        raise InputError(
            f"{len(workloads)} samples; a step of {num_ranks} ranks × {rows_per_rank} rows needs {per_step}: "
            "lower --ranks or --rows-per-rank"
        )
    wanted = min(max(SAMPLES_TO_DRAW // per_step, FEWEST_STEPS), MOST_STEPS)
    per_epoch = len(workloads) // per_step
    if in_order:
        drawn = _in_given_order(per_epoch, per_step, wanted)
    else:
        drawn = _in_random_order(len(workloads), per_step, wanted)
    num_epochs = -(-len(drawn) // per_epoch)
    drawn = drawn.reshape(-1, num_ranks, rows_per_rank)
    steps = DrawnSteps(drawn, workloads[drawn], tokens[drawn], sizes[drawn], num_epochs)
    if groups is not None:
        steps = replace(steps, groups=groups[drawn])
    if ids is not None:
        ids_of_steps = ids.lengths[drawn].sum((1, 2)).cumsum()
        counted = max(int(np.searchsorted(ids_of_steps, IDS_TO_COUNT, side="right")), 1)
        steps = replace(steps, ids=ids.of(drawn[:counted]), num_with_ids=counted)
    return steps


def _in_random_order(num_samples: int, per_step: int, wanted: int) -> np.ndarray:
    """Returns the sample numbers of steps from epochs in random order, int64 `[wanted, per_step]`."""
    per_epoch = num_samples // per_step
    orders = [
        np.random.default_rng([SEED, epoch]).permutation(num_samples)[: per_epoch * per_step]
        for epoch in range(-(-wanted // per_epoch))
    ]
    return np.concatenate(orders)[: wanted * per_step].reshape(wanted, per_step)


def _in_given_order(per_epoch: int, per_step: int, wanted: int) -> np.ndarray:
    """Returns the sample numbers of distinct steps spread over one epoch, int64 `[steps, per_step]`."""
    step = np.linspace(0, per_epoch - 1, min(wanted, per_epoch)).astype(np.int64)
    step = np.random.default_rng(SEED).permutation(step)  # so that the first steps span the epoch
    return step[:, None] * per_step + np.arange(per_step)


def predict(
    steps: DrawnSteps,
    cost: SampleCost,
    strategies: Sequence[Strategy],
    network: Network,
) -> Case:
    """Plans all steps with every strategy and returns the figures. The first strategy is `AS_LOADED`."""
    num_steps, num_ranks, rows_per_rank = steps.workloads.shape
    bytes_loaded = steps.sizes.sum(-1)
    outcomes: dict[str, Outcome] = {}
    of_padded = None
    for strategy in strategies:
        plans, planning = _plans(steps, strategy, cost.pieces, network.ranks_per_node)
        as_loaded = outcomes.get(AS_LOADED)
        outcomes[strategy.name] = _outcome(steps, strategy, plans, planning, as_loaded, cost, network)
        if strategy.name == REBALANCE:
            of_padded = padded_model(plans)
    return Case(
        ranks=num_ranks,
        rows_per_rank=rows_per_rank,
        steps_drawn=num_steps,
        epochs_drawn=steps.num_epochs,
        lower_bound=Spread.of(np.array([lower_bound(step.ravel(), num_ranks) for step in steps.workloads])),
        mean_tokens_per_rank=float(steps.tokens.sum() / num_steps / num_ranks),
        bytes_loaded_per_rank=float(bytes_loaded.mean()),
        all_gather_bytes_per_rank=float(bytes_loaded.max(1).mean() * (num_ranks - 1)),
        padded_model=of_padded,
        outcomes=outcomes,
    )


def _plans(
    steps: DrawnSteps, strategy: Strategy, pieces: PieceCosts, ranks_per_node: int | None
) -> tuple[list[ShufflePlan], float]:
    """Plans all steps as training does. Returns the plans and the median planning time in seconds."""
    if strategy.settings is None:
        return [place_at_home(samples) for samples in _loaded(steps, strategy, ranks_per_node)], 0.0
    plans, seconds = [], []
    for samples in _loaded(steps, strategy, ranks_per_node):
        start = time.thread_time()  # CPU time, so a busy machine does not count
        plans.append((pieces.place if strategy.cuts_samples else place)(samples, strategy.settings))
        seconds.append(time.thread_time() - start)
    return plans, float(np.median(seconds))


def _loaded(steps: DrawnSteps, strategy: Strategy, ranks_per_node: int | None) -> Iterator[RowTable]:
    """Yields the samples of each step as the table that a shuffler plans with."""
    _, num_ranks, rows_per_rank = steps.workloads.shape
    rows = np.full(num_ranks, rows_per_rank)
    no_counts = np.zeros((num_ranks * rows_per_rank, 0), dtype=np.int64)
    groups = None if strategy.group_feature is None else steps.groups
    for step, samples in enumerate(zip(steps.workloads, steps.tokens, steps.sizes, strict=True)):
        workloads, tokens, sizes = (of.ravel() for of in samples)
        counts = (workloads, tokens, tokens, no_counts, sizes, no_counts)
        columns = {} if groups is None else {"groups": groups[step].ravel()}
        loaded = RowTable(rows, rows, *counts, columns=columns, ranks_per_node=ranks_per_node)
        yield replace(loaded, partitioner=strategy.partitioner)


def _outcome(
    steps: DrawnSteps,
    strategy: Strategy,
    plans: Sequence[ShufflePlan],
    planning: float,
    as_loaded: Outcome | None,
    cost: SampleCost,
    network: Network,
) -> Outcome:
    nodes = network.ranks_per_node
    loads = np.stack([plan.loads for plan in plans])
    tokens = np.stack([plan.counts[:, 1] for plan in plans])
    sent, crossing, slowest = np.array([_traffic(plan, nodes) for plan in plans]).T
    moves = np.concatenate([plan.rows.home != plan.destination for plan in plans])
    exchange = slowest / network.bytes_per_second
    pieces = cost.pieces
    num_cut, num_pieces, per_layer, slowest_fetch = np.array([pieces.cuts(plan, nodes) for plan in plans]).T
    fetch = slowest_fetch / network.bytes_per_second
    computing_before = cost.step_times((loads if as_loaded is None else as_loaded.loads).max(1))
    computing = cost.step_times(loads.max(1))
    timed = cost.seconds_per_unit is not None
    # The longest of computing, exchange, and planning decides a step's time. Nothing overlaps the fetch.
    hidden = np.maximum(computing + fetch, exchange)
    times = np.maximum(hidden, planning) if timed else computing
    speedup, error = _ratio(computing_before, times)
    not_hidden = _ratio(computing_before, np.maximum(computing + fetch + exchange, planning))[0]
    without_fetch = np.maximum(np.maximum(computing, fetch), np.maximum(exchange, planning))
    fetch_hidden = _ratio(computing_before, without_fetch)[0]
    largest, mean = loads.max(1), loads.mean(1)
    host_batches = 1 if as_loaded is None else 2
    return Outcome(
        strategy=strategy,
        loads=loads,
        imbalance=Spread.of(_divided(largest, mean)),
        relative_time=float(_divided(largest.sum(), mean.sum())),
        speedup=speedup,
        speedup_standard_error=error,
        speedup_exchange_not_hidden=not_hidden if timed else None,
        speedup_fetch_hidden=fetch_hidden if timed else None,
        step_seconds=float(times.mean()) if timed else None,
        step_seconds_planning_hidden=float(hidden.mean()) if timed else None,
        exchange_seconds=float(exchange.mean()),
        bytes_sent_per_rank=float(sent.mean() / plans[0].num_ranks),
        bytes_of_slowest_rank=float(slowest.mean()),
        share_of_bytes_across_nodes=None if nodes is None else float(crossing.sum() / max(sent.sum(), 1)),
        share_of_samples_moved=float(moves.mean()),
        largest_tokens_per_rank=float(tokens.max(1).mean()),
        most_tokens_per_rank=int(tokens.max()),
        samples_cut=float(num_cut.mean()),
        pieces=float(num_pieces.mean()),
        bytes_fetched_per_rank_and_layer=float(per_layer.mean()),
        fetch_seconds=float(fetch.mean()),
        host_batches_per_rank=host_batches,
        host_bytes_per_rank=float(host_batches * steps.sizes.sum(-1).mean()),
        planning_seconds_measured=planning,
        planning_hidden=planning <= float(hidden.mean()) if timed else None,
        unique_ids=None if strategy.cuts_samples else _unique_ids(steps, plans, as_loaded),
    )


def _traffic(plan: ShufflePlan, ranks_per_node: int | None) -> tuple[float, float, float]:
    """Returns a step's moved bytes, the bytes that leave their node, and the bytes of the slowest rank."""
    home, rank, sizes = plan.rows.home, plan.destination, bytes_of_rows(plan)
    nodes = 1 if ranks_per_node is None else ranks_per_node
    crossing = sizes * (home // nodes != rank // nodes)
    slowest = max(np.bincount(ranks, crossing).max() for ranks in (home, rank))
    return float(sizes[home != rank].sum()), float(crossing.sum()), float(slowest)


def _unique_ids(
    steps: DrawnSteps, plans: Sequence[ShufflePlan], as_loaded: Outcome | None
) -> UniqueIds | None:
    """Counts unique ids of whole samples on each rank; None if ids are unknown."""
    if steps.ids is None:
        return None
    unique = np.array(
        [
            [num_unique(steps.ids, numbers.ravel()[rows]) for rows in plan.partition]
            for numbers, plan in zip(steps.numbers[: steps.num_with_ids], plans, strict=False)
        ]
    )
    per_rank, most_ids = float(unique.mean()), float(unique.max(1).mean())
    loaded = None if as_loaded is None else as_loaded.unique_ids
    return UniqueIds(
        steps=len(unique),
        per_rank=per_rank,
        of_rank_with_most=most_ids,
        per_rank_relative=1.0 if loaded is None else per_rank / max(loaded.per_rank, 1),
        of_rank_with_most_relative=1.0 if loaded is None else most_ids / max(loaded.of_rank_with_most, 1),
    )


def num_unique(ids: dict[int, np.ndarray], samples: np.ndarray) -> int:
    """Counts the distinct ids of `samples`, int64 `[n]`, taken together."""
    found = np.concatenate([ids[sample] for sample in samples.tolist()] or [np.zeros(0, dtype=np.int64)])
    found.sort()  # several times as fast as np.unique
    return int((found[1:] != found[:-1]).sum()) + min(len(found), 1)


def _divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divides elementwise. The result is 1 where the denominator is 0."""
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), 1.0)


def _ratio(before: np.ndarray, after: np.ndarray) -> tuple[float, float | None]:
    """Returns the sum of `before` ÷ the sum of `after`, both `[n]`, and its standard error if n > 1."""
    ratio = float(_divided(before.sum(), after.sum()))
    if len(after) < 2:
        return ratio, None
    if not after.any():
        return ratio, 0.0
    deviations = before - ratio * after
    return ratio, float(np.sqrt((deviations**2).sum() / (len(after) * (len(after) - 1))) / after.mean())
