"""Learns sample costs and rank speeds from step times that travel with the planning gather.

Every rank measures each step. The planning gather carries the times a fixed number of plans later, so all
ranks use them in the same plan, no matter when they were ready. Only rank 0 fits sample costs, because the
last bits of a fit differ between processors, and the gather carries its coefficients. Each rank works out its
own speed from the times of all ranks, and the gather carries the speed, too.
"""

from __future__ import annotations

import io
import logging
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...distributed.exchange import MOST_ON_THEIR_WAY
from ...distributed.plan import ShufflePlan
from ...distributed.ranks import RankGroup
from ...perf_model.cost import NUM_OTHERS, Cost
from .cost_and_speeds import LEAST_TIMES, followed_speed, refitted, speeds_then
from .fitting import LINEAR, is_linear, median_error

if TYPE_CHECKING:
    from ...perf_model.compute_clock import ComputeSpan

logger = logging.getLogger(__name__)
# The gather of a plan carries the times of the plan that was made this many plans earlier.
_DELAY = MOST_ON_THEIR_WAY
# Number of steps that determine a rank's speed, and number of plans between two fits.
_STEPS_OF_SPEED, _PLANS_PER_FIT = 16, 4
# A fit uses enough steps for this many measured times over all ranks, within these bounds on the steps.
_TIMES, _FEWEST_STEPS, _MOST_STEPS = 1024, _STEPS_OF_SPEED, 64
# A rank posts this many numbers before the coefficients: its speed, a hash, and a time.
_NUM_OF_STATE = 3
_SPEED_UNIT = 2.0**-20  # speeds are posted as multiples of this unit
# A warning names ranks that are this slow relative to the median, or lack times, for this many plans.
_NAMED_SPEED, _NAMED_PLANS = 0.8, 50


@dataclass(frozen=True)
class Learned:
    """The state of learning before a plan, equal on every rank. Arrays are float64.

    Attributes:
        cost: cost of samples, in nanoseconds. None before anything was learned.
        speeds: `[ranks]`, measured speeds, regardless of the speed limit.
        counts: `[steps, ranks, 2 + columns]`, counts of the rows computed in timed steps, oldest step first.
        seconds: `[steps, ranks]`, times of these steps.
        in_flight: `[plans, ranks, 2 + columns]`, counts of the plans whose times are not known yet.
        plans: number of plans so far.
    """

    cost: Cost | None
    speeds: np.ndarray
    counts: np.ndarray
    seconds: np.ndarray
    in_flight: np.ndarray
    plans: int

    @staticmethod
    def nothing(num_ranks: int, num_columns: int, cost: Cost | None = None, plans: int = 0) -> Learned:
        """Returns a state without times, for `num_columns` columns of `get_workloads`."""
        none = np.zeros((0, num_ranks, NUM_OTHERS + num_columns))
        return Learned(cost, np.ones(num_ranks), none, np.zeros((0, num_ranks)), none, plans)

    @property
    def num_columns(self) -> int:
        """Number of columns of `get_workloads`, or 0 before the first plan."""
        return self.in_flight.shape[-1] - NUM_OTHERS


class Learning:
    """Learns sample costs and rank speeds, for one planner.

    Loads follow speeds between 1 / `speed_limit` and `speed_limit`. `state` is that before the next plan.
    """

    def __init__(self, group: RankGroup, speed_limit: float) -> None:
        num_ranks = self._num_ranks = group.num_ranks
        self._rank, self._speed_limit = group.rank, speed_limit
        self._hosts, self._names = group.hosts, group.ranks  # names are numbers of ranks in the job
        self._most_steps = min(max(_TIMES // num_ranks, _FEWEST_STEPS), _MOST_STEPS)
        self.state = Learned.nothing(num_ranks, 0)
        self._first = 0  # number of the first plan of this run
        # This rank's times of steps, by plan number, as long as a checkpoint may need them.
        self._times: dict[int, ComputeSpan | float] = {}
        self._number_of: deque[tuple[ShufflePlan, int]] = deque(maxlen=_DELAY)
        # States before the most recent plans, by plan number, also for checkpoints.
        self._states: dict[int, Learned] = {}
        self._slow_plans = np.zeros(num_ranks, dtype=np.int64)  # for how many plans each rank has been slow
        self._last_timed = 0  # the plan that last brought all times
        self._looked_for_linear = False

    def record(self, plan: ShufflePlan, span: ComputeSpan | float) -> None:
        """Records this rank's time of a plan's step, as `LearnedCosts.record` describes."""
        number = self.number_of(plan)
        if number in self._times:
            raise ValueError("the plan's step has a time: record each step once, with the sum of its times")
        self._times[number] = span

    @property
    def num_posted(self) -> int:
        """Number of integers that each rank posts with the next gather."""
        return _NUM_OF_STATE + NUM_OTHERS + self.state.num_columns

    def to_post(self) -> np.ndarray:
        """Returns int64 `[num_posted]`: this rank's speed, a hash of all speeds, a step time, and cost
        coefficients. The columns' coefficients are missing until the first plan tells how many there are."""
        state = self.state
        speed = followed_speed(float(state.speeds[self._rank]), self._own_ratios())
        cost = state.cost
        if self._rank == 0 and state.plans % _PLANS_PER_FIT == 0:
            cost = refitted(cost, state.counts, state.seconds)
            self._say_if_linear(cost)
        time, hashed = round(self._seconds(state.plans - _DELAY) * 1e9), zlib.crc32(state.speeds.tobytes())
        state_numbers = np.array([round(speed / _SPEED_UNIT), hashed, time], dtype=np.int64)
        coefficients = np.zeros(NUM_OTHERS + state.num_columns)
        coefficients[:] = 0.0 if cost is None else cost.coefficients
        return np.concatenate([state_numbers, coefficients.view(np.int64)])

    def updated(self, posted: np.ndarray, num_columns: int) -> Learned:
        """Returns the state for the next plan, updated with `posted`, int64 `[ranks, numbers]`, the results
        of `to_post` on all ranks. Raises a ValueError on every rank if ranks have restored different states.

        `state` stays the same until `planned`, because a plan may fail and be made again. If `num_columns`,
        the number of columns of `get_workloads`, has changed, all that was learned is dropped.
        """
        if (posted[:, 1] != posted[0, 1]).any():
            raise ValueError(
                "ranks have restored different speeds: call load_state on every rank with what that rank "
                'saved, or on all ranks with "learned" only'
            )
        coefficients = np.ascontiguousarray(posted[0, _NUM_OF_STATE:]).view(np.float64).tolist()
        cost = Cost(tuple(coefficients)) if any(coefficients) else None
        seconds = posted[:, _NUM_OF_STATE - 1] * 1e-9
        state = replace(self.state, cost=cost, speeds=posted[:, 0] * _SPEED_UNIT)
        if state.num_columns != num_columns:
            if cost is not None and self._rank == 0:
                logger.warning(
                    f"costs of {state.num_columns} columns were learned, and there are {num_columns}: costs "
                    "and speeds are learned anew"
                )
            state = Learned.nothing(self._num_ranks, num_columns, plans=state.plans)
        if len(state.in_flight) == _DELAY:
            counts = state.in_flight[0]
            if (seconds > 0).all():
                self._last_timed = state.plans
                if counts.any(1).all():  # a rank without samples provides no evidence
                    state = replace(
                        state,
                        counts=np.concatenate([state.counts, counts[None]])[-self._most_steps :],
                        seconds=np.concatenate([state.seconds, seconds[None]])[-self._most_steps :],
                    )
            state = replace(state, in_flight=state.in_flight[1:])
        if self._rank == 0 and state.plans - self._last_timed == _NAMED_PLANS:
            missing = [self._names[rank] for rank in np.flatnonzero(seconds == 0).tolist()]
            logger.warning(
                f"LearnedCosts has not seen the times of all ranks for {_NAMED_PLANS} plans, and learns "
                f"nothing from them; they are missing from ranks {missing}. In a loop of your own, call "
                "record(plan, seconds) on every rank after each step. Pipelines time no step without a "
                "backward"
            )
        return state

    def speeds(self, state: Learned) -> np.ndarray | None:
        """Returns the speeds that loads should follow, float64 `[ranks]`, or None if all are equal."""
        speeds = np.clip(state.speeds, 1 / self._speed_limit, self._speed_limit)
        return None if (speeds == speeds[0]).all() else speeds

    def planned(self, plan: ShufflePlan, state: Learned) -> None:
        """Registers a plan made in a state that `updated` returned. `record` receives its time later."""
        self._states[state.plans] = self.state
        self._states.pop(state.plans - 2 * _DELAY, None)
        in_flight = np.concatenate([state.in_flight, plan.counts[None]])
        self.state = replace(state, in_flight=in_flight, plans=state.plans + 1)
        self._number_of.append((plan, state.plans))
        self._times.pop(state.plans - 3 * _DELAY, None)
        self._name_slow(state.speeds)

    def learned_cost(self) -> Cost | None:
        """Returns the learned cost with its error in the last steps, or None before anything was learned, or
        before a resumed run has any measured step."""
        cost, counts, seconds = self.state.cost, self.state.counts, self.state.seconds
        if cost is None or not len(counts):
            return None
        at_speed_1 = seconds * speeds_then(cost, counts, seconds)
        return replace(cost, median_error=median_error(cost.step_seconds(counts), at_speed_1))

    def number_of(self, plan: ShufflePlan) -> int:
        """Returns the number of a recent plan, counted from 0. Raises a ValueError for any other plan."""
        for kept_plan, number in tuple(self._number_of):  # a copy, because the planning thread appends
            if kept_plan.destination is plan.destination:  # callers hold copies with `job` added
                return number
        raise ValueError(
            f"the plan is none of the last {_DELAY} of this shuffler: record a step, or save what was "
            "learned, before so many more are planned; in a pipeline, leave out the plan"
        )

    def saved(self, next_plan: int | None) -> dict[str, bytes]:
        """Returns the entries of a checkpoint: "learned", the state before a plan, equal on all ranks, and
        "times", this rank's times of the plans in flight then. Waits for the ends of their steps.

        `next_plan` is the number of the first plan whose step has not run, a recent plan or the next one.
        None means the first plan of the run, even if it is not made yet.
        """
        state = self._states.get(self._first if next_plan is None else next_plan, self.state)
        before = range(state.plans - len(state.in_flight), state.plans)
        times = np.array([self._seconds(number) for number in before])
        learned = _to_bytes(
            nanoseconds=np.array([] if state.cost is None else state.cost.coefficients),
            hosts=np.array(self._hosts),
            names=np.array(self._names),
            plans=np.array(state.plans),
            **{name: getattr(state, name) for name in _ARRAYS},
        )
        return {"learned": learned, "times": _to_bytes(times=times)}

    def restore(self, saved: dict[str, bytes]) -> None:
        """Restores the entries that `saved` returned. If ranks or hosts have changed, or "times" is missing,
        only the cost and the number of plans are restored. A RuntimeError if plans were already made."""
        if self._number_of:
            raise RuntimeError("load_state came after the first plan; call it before")
        self._times.clear()
        arrays, times = _from_bytes(saved["learned"]), saved.get("times")
        coefficients = tuple(arrays["nanoseconds"].tolist())
        cost = Cost(coefficients) if coefficients else None
        self._first = self._last_timed = int(arrays["plans"])
        ranks = arrays["names"].tolist(), arrays["hosts"].tolist()
        if times is None or ranks != (list(self._names), list(self._hosts)):
            num_columns = arrays["in_flight"].shape[-1] - NUM_OTHERS
            self.state = Learned.nothing(self._num_ranks, num_columns, cost, self._last_timed)
            return
        self.state = Learned(cost=cost, plans=self._last_timed, **{name: arrays[name] for name in _ARRAYS})
        plan_times = _from_bytes(times)["times"].tolist()
        first = self.state.plans - len(plan_times)
        self._times = {first + number: seconds for number, seconds in enumerate(plan_times)}

    def _seconds(self, number: int) -> float:
        """Returns this rank's time of a plan's step, or 0 if not measured. Waits for the end of the step."""
        span = self._times.get(number, 0.0)
        return span if isinstance(span, float) else max(span.seconds(), 0.0)

    def _own_ratios(self) -> np.ndarray:
        """Returns predicted ÷ measured times of this rank, relative to the median rank, float64 `[steps]`."""
        state = self.state
        if len(state.in_flight) == _DELAY and not state.in_flight[:, self._rank].any():
            return np.ones(1)  # it was too slow to get samples, and needs some to show that it no longer is
        if state.cost is None:
            return np.zeros(0)
        ratios = state.cost.step_seconds(state.counts) / state.seconds
        ratios = ratios[(ratios > 0).all(1)][-_STEPS_OF_SPEED:]  # a rank's samples may cost nothing
        if len(ratios) < _STEPS_OF_SPEED:
            return np.zeros(0)
        return ratios[:, self._rank] / np.median(ratios, axis=1)

    def _say_if_linear(self, cost: Cost | None) -> None:
        """Warns once if workloads are linear in tokens, so that no quadratic cost can be learned."""
        counts = self.state.counts
        if cost is not None and self.state.seconds.size >= LEAST_TIMES and not self._looked_for_linear:
            self._looked_for_linear = True
            if is_linear(counts.reshape(-1, counts.shape[-1])):
                logger.warning(LINEAR)

    def _name_slow(self, speeds: np.ndarray) -> None:
        """Warns of each rank that has been slow for long. Call it once per plan."""
        relative = speeds / np.median(speeds)
        self._slow_plans = np.where(relative <= _NAMED_SPEED, self._slow_plans + 1, 0)
        for rank in np.flatnonzero(self._slow_plans == _NAMED_PLANS).tolist() if self._rank == 0 else ():
            logger.warning(
                f"rank {self._names[rank]} on {self._hosts[rank]} computes {relative[rank]:.2f} times as "
                f"fast as the median rank: its GPU or host is slow. Loads follow speeds up to "
                f"speed_limit={self._speed_limit}, if rows, tokens, and the partitioner allow it"
            )


def together(posted: Sequence[np.ndarray]) -> np.ndarray:
    """Returns one post for ranks that compute the same samples, from those of each, int64 `[numbers]`.

    It is that of the first rank, with the longest time, or with 0 if a rank has not measured its time. Raises
    a ValueError if ranks have restored different states.
    """
    if len({len(post) for post in posted}) > 1:
        raise ValueError("ranks that compute together have restored different states: restore it on each")
    times = [int(post[_NUM_OF_STATE - 1]) for post in posted]
    post = posted[0].copy()
    post[_NUM_OF_STATE - 1] = max(times) if all(times) else 0
    return post


_ARRAYS = ("speeds", "counts", "seconds", "in_flight")


def _to_bytes(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _from_bytes(saved: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
