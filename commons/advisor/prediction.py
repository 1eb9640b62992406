"""What each strategy gives on the drawn steps."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from commons.advisor.drawn_steps import DrawnSteps, LoadedSteps
from commons.advisor.sample_cost import SampleCost
from commons.advisor.strategies import Placed, Strategy, per_rank, rank_of_samples
from commons.partition import balance_window, lower_bound, rebalance, refined


@dataclass(frozen=True)
class Network:
    """What the exchange goes over.

    Attributes:
        bytes_per_second: of one rank, in each direction.
        ranks_per_node: consecutive ranks of a node, within which bytes cost nothing; None where all do.
    """

    bytes_per_second: float
    ranks_per_node: int | None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over steps (of a window: over windows); None where there is only one."""

    mean: float
    std: float | None

    @staticmethod
    def of(values: np.ndarray) -> Spread:
        """Of float64 `[steps]`."""
        return Spread(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class Outcome:
    """One strategy on the drawn steps.

    Attributes:
        strategy: which.
        loads: float64 `[steps, ranks]`.
        imbalance: largest ÷ mean load of a step; of a window, the sums of both over its steps.
        relative_time: sum of the largest loads ÷ sum of the mean loads; 1.0 is perfect.
        speedup: time of all steps as loaded ÷ their time so, the exchange running beside the step.
        speedup_error: its standard error, from how steps differ; None from a single one.
        step_seconds: mean, of computing or the exchange beside it, whichever is longer; None if only ratios
            are known.
        exposed_speedup: the speedup if nothing of the exchange is hidden; None if only ratios are known.
        bytes_sent: mean over ranks and steps.
        bytes_slowest: of the rank that sends or receives most, mean over steps.
        share_across_nodes: of bytes sent; None without nodes.
        exchange_seconds: of the slowest rank, mean over steps.
        samples_moved: share that leaves the rank that loaded them.
        largest_tokens: of the rank with most, mean over steps.
        most_tokens: of any rank in any step.
        largest_step: the largest of a window's steps ÷ its mean step, by total workload; 1.0 without one.
        host_batches: that a rank holds, the one about to be copied to the device included.
        planning_seconds: median, measured on this machine; per window.
    """

    strategy: Strategy
    loads: np.ndarray
    imbalance: Spread
    relative_time: float
    speedup: float
    speedup_error: float | None
    step_seconds: float | None
    exposed_speedup: float | None
    bytes_sent: float
    bytes_slowest: float
    share_across_nodes: float | None
    exchange_seconds: float
    samples_moved: float
    largest_tokens: float
    most_tokens: int
    largest_step: float
    host_batches: int
    planning_seconds: float

    @property
    def planning_is_hidden(self) -> bool | None:
        """Whether it takes no longer than the steps that it runs beside; None if these are not known."""
        if self.step_seconds is None:
            return None
        return self.planning_seconds <= self.step_seconds * self.strategy.window


@dataclass(frozen=True)
class Case:
    """A number of ranks, and of rows on each.

    Attributes:
        num_ranks, rows_per_rank, num_steps, num_epochs: what was drawn.
        lower_bound: imbalance that no placement within a step beats.
        mean_tokens: of a rank and step.
        bytes_loaded: by a rank in a step, mean.
        all_gather_bytes: what a rank receives in a step if every sample goes to every rank.
        outcomes: of all strategies, as loaded first.
    """

    num_ranks: int
    rows_per_rank: int
    num_steps: int
    num_epochs: int
    lower_bound: Spread
    mean_tokens: float
    bytes_loaded: float
    all_gather_bytes: float
    outcomes: list[Outcome]

    def outcome(self, name: str) -> Outcome | None:
        """Of the strategy of that name, if there is one."""
        return next((outcome for outcome in self.outcomes if outcome.strategy.name == name), None)


def warm_up() -> None:
    """Compiles what is compiled, or loads it if it was before, so that no figure has it in it.

    The first time on a machine that takes a minute on one core: another process does half of it, and leaves
    it in numba's cache.
    """
    ones = np.ones(2, dtype=np.int64)
    slowest = (ones, np.arange(2), 2)
    other = multiprocessing.get_context("fork").Process(target=rebalance, args=slowest, daemon=True)
    other.start()
    refined(ones, 2)
    balance_window(ones, 1, 2)
    lower_bound(ones, 2)
    other.join()
    rebalance(*slowest)


def predict(
    steps: DrawnSteps,
    cost: SampleCost,
    strategies: Sequence[Strategy],
    network: Network,
    progress: Callable[[], object],
) -> Case:
    """Plans all steps by every strategy; the first one is as loaded. Calls `progress` after each strategy."""
    bounds = np.array([lower_bound(of_step, steps.num_ranks) for of_step in steps.workloads])
    per_rank_bytes = steps.sizes.reshape(steps.num_steps, steps.num_ranks, -1).sum(-1)
    outcomes: list[Outcome] = []
    for strategy in strategies:
        placed = [_place(group, strategy, network) for group in steps.groups(strategy.window)]
        outcomes.append(_outcome(strategy, placed, outcomes[0] if outcomes else None, cost, network))
        progress()
    return Case(
        num_ranks=steps.num_ranks,
        rows_per_rank=steps.rows_per_rank,
        num_steps=steps.num_steps,
        num_epochs=steps.num_epochs,
        lower_bound=Spread.of(bounds),
        mean_tokens=float(steps.tokens.sum() / steps.num_steps / steps.num_ranks),
        bytes_loaded=float(per_rank_bytes.mean()),
        all_gather_bytes=float(per_rank_bytes.max(1).mean() * (steps.num_ranks - 1)),
        outcomes=outcomes,
    )


@dataclass(frozen=True)
class _Group:
    """Steps that were placed together.

    Attributes:
        loads, tokens: float64 `[steps, ranks]`.
        sent, paid: float64 `[steps, ranks]`, bytes; paid are those that cost time, the larger of what is sent
            and received.
        crossed: bytes that leave their node.
        moved: share of the samples.
        seconds: that the plan took.
    """

    loads: np.ndarray
    tokens: np.ndarray
    sent: np.ndarray
    paid: np.ndarray
    crossed: float
    moved: float
    seconds: float


def _place(steps: LoadedSteps, strategy: Strategy, network: Network) -> _Group:
    start = time.perf_counter()
    placed = strategy.place(steps)
    seconds = time.perf_counter() - start
    home, rank_of = steps.home, rank_of_samples(placed, len(steps.workloads))
    moves = home != rank_of
    crosses = moves
    if network.ranks_per_node is not None:
        crosses = home // network.ranks_per_node != rank_of // network.ranks_per_node
    step_of = _step_of_samples(placed, len(steps.workloads))
    sent, paid_out = (_by_rank(steps.sizes, chosen, step_of, home, steps) for chosen in (moves, crosses))
    paid_in = _by_rank(steps.sizes, crosses, step_of, rank_of, steps)
    return _Group(
        loads=per_rank(steps.workloads, placed),
        tokens=per_rank(steps.tokens, placed),
        sent=sent,
        paid=np.maximum(paid_out, paid_in),
        crossed=float(steps.sizes[crosses].sum()),
        moved=float(moves.mean()),
        seconds=seconds,
    )


def _step_of_samples(placed: Placed, num_samples: int) -> np.ndarray:
    """int64 `[samples]`: the step that each is computed in, before which it is exchanged."""
    step_of = np.empty(num_samples, dtype=np.int64)
    for number, step in enumerate(placed):
        step_of[np.concatenate(step)] = number
    return step_of


def _by_rank(
    sizes: np.ndarray, chosen: np.ndarray, step_of: np.ndarray, rank_of: np.ndarray, steps: LoadedSteps
) -> np.ndarray:
    """float64 `[steps, ranks]`: bytes of the chosen samples."""
    at = step_of[chosen] * steps.num_ranks + rank_of[chosen]
    sums = np.bincount(at, sizes[chosen], minlength=steps.num_steps * steps.num_ranks)
    return sums.reshape(steps.num_steps, steps.num_ranks)


def _outcome(
    strategy: Strategy,
    groups: list[_Group],
    as_loaded: Outcome | None,
    cost: SampleCost,
    network: Network,
) -> Outcome:
    loads, tokens, sent, paid = (
        np.concatenate([getattr(group, name) for group in groups])
        for name in ("loads", "tokens", "sent", "paid")
    )
    before = loads if as_loaded is None else as_loaded.loads
    exchange = paid.max(1) / network.bytes_per_second
    times_before, computing = (cost.step_times(of.max(1)) for of in (before, loads))
    timed = cost.seconds_per_unit is not None
    # The exchange runs beside a step: whichever takes longer decides.
    times = np.maximum(computing, exchange) if timed else computing
    in_windows = (-1, strategy.window)
    speedup, error = _ratio(times_before.reshape(in_windows).sum(1), times.reshape(in_windows).sum(1))
    nodes = network.ranks_per_node is not None
    largest, mean = loads.max(1).reshape(in_windows), loads.mean(1).reshape(in_windows)
    return Outcome(
        strategy=strategy,
        loads=loads,
        imbalance=Spread.of(_divided(largest.sum(1), mean.sum(1))),
        relative_time=float(_divided(largest.sum(), mean.sum())),
        speedup=speedup,
        speedup_error=error,
        step_seconds=float(times.mean()) if timed else None,
        exposed_speedup=_ratio(times_before, computing + exchange)[0] if timed else None,
        bytes_sent=float(sent.mean()),
        bytes_slowest=float(paid.max(1).mean()),
        share_across_nodes=_share(sum(group.crossed for group in groups), float(sent.sum()))
        if nodes
        else None,
        exchange_seconds=float(exchange.mean()),
        samples_moved=float(np.mean([group.moved for group in groups])),
        largest_tokens=float(tokens.max(1).mean()),
        most_tokens=int(tokens.max()),
        largest_step=float(_divided(mean.max(1), mean.mean(1)).max()),
        host_batches=1 if as_loaded is None else strategy.window + 1,
        planning_seconds=float(np.median([group.seconds for group in groups])),
    )


def _divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Ratios; 1 where there is nothing to compute."""
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), 1.0)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ratio(before: np.ndarray, after: np.ndarray) -> tuple[float, float | None]:
    """Sum of `[n]` ÷ sum of `[n]`, and the standard error of that as an estimate from n draws, if n > 1."""
    ratio = float(_divided(before.sum(), after.sum()))
    if len(after) < 2:
        return ratio, None
    if not after.any():
        return ratio, 0.0
    deviations = before - ratio * after
    return ratio, float(np.sqrt((deviations**2).sum() / (len(after) * (len(after) - 1))) / after.mean())
