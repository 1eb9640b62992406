"""Draws training steps from the samples, and predicts each strategy's outcome on them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..distributed.placement import place, place_at_home
from ..distributed.plan import RowTable, ShufflePlan
from ..partition import lower_bound
from . import InputError
from .padding import PaddedModel, padded_model
from .pieces import PieceCosts, bytes_of_rows
from .samples import SampleCost
from .strategies import AS_LOADED, REBALANCE, Strategy, has_extension

SEED = 0
# Fewer ranks get more steps, because their steps vary more and take less time to plan.
SAMPLES_TO_DRAW = 2**18
FEWEST_STEPS, MOST_STEPS = 32, 256


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
        workloads, tokens, sizes: workloads, tokens, and bytes of the samples, int64 `[steps, ranks, rows]`
            each.
        num_epochs: number of epochs from which the steps were drawn.
    """

    workloads: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray
    num_epochs: int


@dataclass(frozen=True)
class Outcome:
    """One strategy's figures on the drawn steps; all but the first two are entries of the JSON output.

    Attributes:
        strategy: the strategy.
        loads: loads of the ranks, float64 `[steps, ranks]`.
        imbalance: largest ÷ mean load of a step, mean over steps.
        speedup: time of all steps as loaded ÷ their time with this strategy. Exchange and planning overlap a
            step, and nothing overlaps the fetch. Without times, all three count as 0.
        speedup_exchange_not_hidden: the speedup if the exchange overlaps nothing; None without times.
        step_seconds: mean time of a step, which is the longest of three times: computing plus fetch,
            exchange, and planning. None without times.
        exchange_seconds: exchange time of the slowest rank, mean over steps.
        bytes_sent_per_rank: bytes that a rank sends, mean over ranks and steps.
        share_of_samples_moved: share of whole samples and pieces that leave the rank that loaded them.
        largest_tokens_per_rank: tokens of the rank with most, mean over steps.
        samples_cut, pieces: numbers of cut samples and of their pieces, mean over steps.
        bytes_fetched_per_rank_and_layer: bytes of keys and values that a rank fetches per layer in forward,
            mean over ranks and steps.
        fetch_seconds: time of the slowest rank for the keys, values, and gradients of all layers, mean over
            steps.
        planning_seconds_measured: median planning time per step, on this machine.
    """

    strategy: Strategy
    loads: np.ndarray
    imbalance: float
    speedup: float
    speedup_exchange_not_hidden: float | None
    step_seconds: float | None
    exchange_seconds: float
    bytes_sent_per_rank: float
    share_of_samples_moved: float
    largest_tokens_per_rank: float
    samples_cut: float
    pieces: float
    bytes_fetched_per_rank_and_layer: float
    fetch_seconds: float
    planning_seconds_measured: float

    @property
    def relative_time(self) -> float:
        """Sum of the largest loads ÷ sum of the mean loads; 1.0 is perfect."""
        return float(_divided(self.loads.max(1).sum(), self.loads.mean(1).sum()))


@dataclass(frozen=True)
class Case:
    """Figures for one number of ranks and rows; all but `outcomes` are entries of the JSON output.

    Attributes:
        ranks, rows_per_rank, steps_drawn, epochs_drawn: numbers of ranks, rows per rank, steps, and epochs.
        lower_bound: lower bound of a step's imbalance, mean over steps. No placement of whole samples beats
            it.
        mean_tokens_per_rank, bytes_loaded_per_rank: tokens and bytes per rank, mean over ranks and steps.
        all_gather_bytes_per_rank: bytes that a rank receives per step if all samples go to all ranks.
        padded_model: figures for a model that pads; None for a single rank, or without the extension.
        outcomes: outcome of each strategy by name, as loaded first.
    """

    ranks: int
    rows_per_rank: int
    steps_drawn: int
    epochs_drawn: int
    lower_bound: float
    mean_tokens_per_rank: float
    bytes_loaded_per_rank: float
    all_gather_bytes_per_rank: float
    padded_model: PaddedModel | None
    outcomes: dict[str, Outcome]


def draw_steps(
    workloads: np.ndarray, tokens: np.ndarray, sizes: np.ndarray, num_ranks: int, rows_per_rank: int
) -> DrawnSteps:
    """Draws steps from epochs in random order, without replacement. Every run draws the same steps.

    Incomplete steps at the end of an epoch are left out.

    Args:
        workloads, tokens, sizes: values of the samples, int64 `[samples]` each; sizes are in bytes.
        num_ranks, rows_per_rank: size of each step.

    Raises:
        InputError: there are fewer samples than one step needs.
    """
    num_samples, per_step = len(workloads), num_ranks * rows_per_rank
    if per_step > num_samples:
        raise InputError(
            f"{num_samples} samples; a step of {num_ranks} ranks × {rows_per_rank} rows needs {per_step}: "
            "lower --ranks or --rows-per-rank"
        )
    wanted = min(max(SAMPLES_TO_DRAW // per_step, FEWEST_STEPS), MOST_STEPS)
    per_epoch = num_samples // per_step
    num_epochs = -(-wanted // per_epoch)
    orders = [
        np.random.default_rng([SEED, epoch]).permutation(num_samples)[: per_epoch * per_step]
        for epoch in range(num_epochs)
    ]
    drawn = np.concatenate(orders)[: wanted * per_step].reshape(wanted, num_ranks, rows_per_rank)
    return DrawnSteps(workloads[drawn], tokens[drawn], sizes[drawn], num_epochs)


def predict(steps: DrawnSteps, cost: SampleCost, strategies: Sequence[Strategy], network: Network) -> Case:
    """Plans all steps with every strategy and returns the figures. The first strategy is `AS_LOADED`."""
    num_steps, num_ranks, rows_per_rank = steps.workloads.shape
    bytes_loaded = steps.sizes.sum(-1)
    outcomes: dict[str, Outcome] = {}
    of_padded = None
    for strategy in strategies:
        plans, planning = _plans(steps, strategy, cost.pieces, network.ranks_per_node)
        as_loaded = outcomes.get(AS_LOADED)
        outcomes[strategy.name] = _outcome(strategy, plans, planning, as_loaded, cost, network)
        if strategy.name == REBALANCE and has_extension("padded"):
            of_padded = padded_model(plans)
    return Case(
        ranks=num_ranks,
        rows_per_rank=rows_per_rank,
        steps_drawn=num_steps,
        epochs_drawn=steps.num_epochs,
        lower_bound=float(np.mean([lower_bound(step.ravel(), num_ranks) for step in steps.workloads])),
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
        return [place_at_home(samples) for samples in _loaded(steps, ranks_per_node)], 0.0
    plans, seconds = [], []
    for samples in _loaded(steps, ranks_per_node):
        start = time.thread_time()  # CPU time, so a busy machine does not count
        plans.append((pieces.place if strategy.cuts_samples else place)(samples, strategy.settings))
        seconds.append(time.thread_time() - start)
    return plans, float(np.median(seconds))


def _loaded(steps: DrawnSteps, ranks_per_node: int | None) -> Iterator[RowTable]:
    """Yields the samples of each step as the table that a shuffler plans with."""
    _, num_ranks, rows_per_rank = steps.workloads.shape
    rows = np.full(num_ranks, rows_per_rank)
    no_counts = np.zeros((num_ranks * rows_per_rank, 0), dtype=np.int64)
    for samples in zip(steps.workloads, steps.tokens, steps.sizes, strict=True):
        workloads, tokens, sizes = (of.ravel() for of in samples)
        counts = (workloads, tokens, tokens, no_counts, sizes, no_counts)
        yield RowTable(rows, rows, *counts, ranks_per_node=ranks_per_node)


def _outcome(
    strategy: Strategy,
    plans: Sequence[ShufflePlan],
    planning: float,
    as_loaded: Outcome | None,
    cost: SampleCost,
    network: Network,
) -> Outcome:
    nodes, pieces = network.ranks_per_node, cost.pieces
    loads = np.stack([plan.loads for plan in plans])
    tokens = np.stack([plan.counts[:, 1] for plan in plans])
    moves = np.concatenate([plan.rows.home != plan.destination for plan in plans])
    sent, slowest = np.array([_traffic(plan, nodes) for plan in plans]).T
    num_cut, num_pieces, per_layer, slowest_fetch = np.array([pieces.cuts(plan, nodes) for plan in plans]).T
    exchange, fetch = slowest / network.bytes_per_second, slowest_fetch / network.bytes_per_second
    before = cost.step_times((loads if as_loaded is None else as_loaded.loads).max(1)).sum()
    computing = cost.step_times(loads.max(1))
    timed = cost.seconds_per_unit is not None
    # The longest of computing, exchange, and planning decides a step's time. Nothing overlaps the fetch.
    with_fetch = computing + fetch
    times = np.maximum(np.maximum(with_fetch, exchange), planning) if timed else computing
    not_hidden = np.maximum(with_fetch + exchange, planning)
    return Outcome(
        strategy=strategy,
        loads=loads,
        imbalance=float(_divided(loads.max(1), loads.mean(1)).mean()),
        speedup=float(_divided(before, times.sum())),
        speedup_exchange_not_hidden=float(_divided(before, not_hidden.sum())) if timed else None,
        step_seconds=float(times.mean()) if timed else None,
        exchange_seconds=float(exchange.mean()),
        bytes_sent_per_rank=float(sent.mean() / plans[0].num_ranks),
        share_of_samples_moved=float(moves.mean()),
        largest_tokens_per_rank=float(tokens.max(1).mean()),
        samples_cut=float(num_cut.mean()),
        pieces=float(num_pieces.mean()),
        bytes_fetched_per_rank_and_layer=float(per_layer.mean()),
        fetch_seconds=float(fetch.mean()),
        planning_seconds_measured=planning,
    )


def _traffic(plan: ShufflePlan, ranks_per_node: int | None) -> tuple[float, float]:
    """Returns a step's moved bytes, and the bytes of the slowest rank that leave its node or arrive there."""
    home, rank, sizes = plan.rows.home, plan.destination, bytes_of_rows(plan)
    nodes = 1 if ranks_per_node is None else ranks_per_node
    crossing = sizes * (home // nodes != rank // nodes)
    slowest = max(np.bincount(ranks, crossing).max() for ranks in (home, rank))
    return float(sizes[home != rank].sum()), float(slowest)


def _divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divides elementwise. The result is 1 where the denominator is 0."""
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), 1.0)
