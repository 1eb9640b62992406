"""Costs and speeds that are learned from recorded times."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed import BatchShuffler, Extension, IdentityShuffler, ShufflePlan
from commons.extensions.learned_costs import LearnedCosts
from commons.perf_model import Cost
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.commons.distributed.internals import RankGroup
from tests.commons.extensions.learned_costs.learning_pipelines import learned
from tests.on_ranks import on_ranks

ROWS, NOISE = 16, 0.02


class LengthShuffler(BatchShuffler):
    """The workload is the square of the length, and time is not."""

    def get_workloads(self, batch):
        return batch["length"] ** 2

    def get_tokens(self, batch):
        return batch["length"]


def _learning(group: Any = None, kind: type[BatchShuffler] = LengthShuffler, **settings: Any) -> Any:
    """Makes a shuffler that learns, whose rows follow the load unless the settings say otherwise."""
    settings = {"extensions": [LearnedCosts()], "equal_rows": False} | settings
    return kind(group, **settings)


def _state_of(shuffler: BatchShuffler) -> Any:
    return learned(shuffler)._learning.state


def _batch(step: int, lengths: tuple[int, int] = (20, 2000), rows: int = ROWS) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng((step, dist.get_rank()))
    return {"length": torch.from_numpy(rng.integers(*lengths, rows))}


def _seconds(plan: ShufflePlan, step: int, speeds: list[float]) -> np.ndarray:
    """`[ranks]`, the times that a step takes; some steps stand out."""
    of_samples = 2e-3 + 1e-5 * plan.rows.tokens
    seconds = 5e-3 + np.bincount(plan.destination, of_samples, minlength=plan.num_ranks)
    noise = np.random.default_rng(step).lognormal(0, NOISE, plan.num_ranks)
    return seconds / np.array(speeds) * noise * (5 if step % 17 == 3 else 1)


def _train(
    shuffler: BatchShuffler, first: int, last: int, speeds: list[float], **drawn: Any
) -> tuple[list[ShufflePlan], list[float]]:
    """The plans, and largest ÷ mean time of each step without noise."""
    plans, imbalance = [], []
    for step in range(first, last):
        batch = _batch(step, **drawn)
        plan = shuffler.plan(batch)
        learned(shuffler).record(plan, float(_seconds(plan, step, speeds)[shuffler.group.rank]))
        plans.append(plan)
        exact = (5e-3 + np.bincount(plan.destination, 2e-3 + 1e-5 * plan.rows.tokens)) / np.array(speeds)
        imbalance.append(float(exact.max() / exact.mean()))
    return plans, imbalance


@on_ranks(3)
def test_loads_follow_times_and_speeds_within_fifty_steps():
    shuffler, equal = _learning(), [1.0] * 3
    _, before = _train(shuffler, 0, 60, equal)
    _, during = _train(shuffler, 60, 130, [1.0, 0.5, 1.0])
    followed = _state_of(shuffler).speeds
    _, after = _train(shuffler, 130, 200, equal)
    assert np.mean(before[40:]) < 1.03 < 1.2 < np.mean(during[:5])
    assert np.mean(during[50:]) < 1.05
    assert np.mean(after[50:]) < 1.04
    assert followed[1] / followed[0] == pytest.approx(0.5, rel=0.1)
    assert _state_of(shuffler).speeds.tolist() == equal
    assert learned(shuffler).cost().median_error < 1.5 * NOISE
    of_ranks: list[Any] = [None] * 3
    dist.all_gather_object(of_ranks, (before, during, after, followed.tolist()))
    assert of_ranks == of_ranks[:1] * 3


@on_ranks(2)
def test_speeds_stay_within_the_limit():
    shuffler = _learning(extensions=[LearnedCosts(1.2)])
    plans, _ = _train(shuffler, 0, 80, [1.0, 0.4])
    assert np.ptp(_state_of(shuffler).speeds) > 0.8  # measured, and named, as it is
    assert plans[-1].rows.speeds.tolist() == pytest.approx([1.2, 1 / 1.2], rel=1e-3)


@on_ranks(2)
def test_a_rank_too_slow_for_a_sample_can_recover():
    shuffler = _learning(extensions=[LearnedCosts(30.0)])
    plans, _ = _train(shuffler, 0, 120, [1.0, 0.03], rows=2)
    is_starved = all((plan.destination == 0).all() for plan in plans[-4:])
    _train(shuffler, 120, 400, [1.0, 1.0], rows=2)
    assert is_starved and _state_of(shuffler).speeds.tolist() == pytest.approx([1.0, 1.0], rel=0.1)


@pytest.mark.parametrize("planned_ahead", [0, 4])
@on_ranks(2)
def test_a_resumed_run_plans_as_the_uninterrupted_one(planned_ahead):
    whole, resumed, other, stopped = (_learning() for _ in range(4))
    speeds = [1.0, 0.5]
    last = _train(whole, 0, 45, speeds)[0][-1]
    ahead = [whole.plan(_batch(step)) for step in range(45, 45 + planned_ahead)]
    if not planned_ahead:
        whole.plan(None)  # a loader's end, which the resumed run does not meet
    saved = learned(whole).state(last)
    assert learned(whole).state() == saved  # the last one recorded
    for step, plan in enumerate(ahead, 45):
        learned(whole).record(plan, float(_seconds(plan, step, speeds)[whole.group.rank]))
    rest = ahead + _train(whole, 45 + planned_ahead, 90, speeds)[0]
    assert rest[-1].rows.speeds is not None and rest[-1].predicted_seconds is not None
    learned(resumed).load_state(saved)
    assert _train(resumed, 45, 90, speeds)[0] == rest
    assert _train(other, 45, 90, speeds)[0] != rest
    learned(stopped).load_state(saved)
    for step in range(45, 47):  # planned ahead, and then the run stops before its first step
        stopped.plan(_batch(step))
    assert learned(stopped).state() == saved


class Named(Extension):
    name, order = "named", 90


@on_ranks(2)
def test_what_was_restored_stays_where_an_extension_is_added_or_a_pipeline_made():
    shuffler = _learning()
    saved = learned(shuffler).state(_train(shuffler, 0, 60, [1.0, 0.5])[0][-1])
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for group, add in ((None, True), (alone, False), (alone, True)):
        resumed = _learning(group)
        learned(resumed).load_state(saved)
        if add:
            resumed.add_extension(Named())
        resumed.plan_over(RankGroup.of())  # as a pipeline does
        assert resumed.plan(_batch(60)).predicted_seconds is not None


@on_ranks(4)
def test_a_set_of_other_ranks_or_hosts_keeps_the_cost_and_learns_its_speeds_anew():
    groups = [[dist.new_group(ranks) for ranks in sets] for sets in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    own, other = groups[0][dist.get_rank() // 2], groups[1][dist.get_rank() % 2]
    before = _learning(own)
    saved = learned(before).state(_train(before, 0, 60, [1.0, 0.5])[0][-1])
    for group, hosts, is_new in ((own, None, False), (other, None, True), (own, ["another", "host"], True)):
        shuffler = _learning(group)
        learning = learned(shuffler)._learning
        learning._hosts = hosts or learning._hosts
        learned(shuffler).load_state(saved)
        assert learning.state.cost is not None
        assert (learned(shuffler).cost() is None) == is_new
        _train(shuffler, 60, 62, [1.0, 1.0])
        speeds = _state_of(shuffler).speeds.tolist()
        assert speeds == [1.0, 1.0] if is_new else speeds[0] > 1.2 > 0.8 > speeds[1]


class UnknownCost(LengthShuffler):
    def get_workloads(self, batch):
        return super().get_workloads(batch) * (next(self.steps) not in self.unknown)


@pytest.mark.parametrize("unknown", [range(90), range(30, 31)])
@on_ranks(2)
def test_workloads_may_be_zero(unknown):
    shuffler = _learning(kind=UnknownCost)
    shuffler.steps, shuffler.unknown = itertools.count(), unknown
    imbalance = _train(shuffler, 0, 90, [1.0, 0.5])[1]
    assert np.mean(imbalance[60:]) < 1.05


@on_ranks(2)
def test_errors():
    shuffler, resumed = _learning(), _learning()
    plans = [shuffler.plan(_batch(step)) for step in range(30)]
    of = learned(shuffler)
    if dist.get_rank() == 0:
        learned(resumed).load_state(of.state(plans[-1]))
    errors = {
        "the plan is none of the last": error_of(of.record, plans[0], 1.0),
        "record got nan seconds": error_of(of.record, plans[-1], float("nan")),
        "record each step once": error_of(lambda: [of.record(plans[-1], 1.0) for _ in range(2)]),
        "has no effect with LearnedCosts: leave out one": error_of(_learning, cost=Cost((0.0, 0.0, 1.0))),
        "speed_limit=0.5: expected 1 to": error_of(LearnedCosts, 0.5),
        "an IdentityShuffler moves no samples": error_of(_learning, kind=IdentityShuffler),
        "KeyError: 'learned'": error_of(learned(_learning()).load_state, {"times": b""}),
        "load_state came after the first plan": error_of(of.load_state, of.state(plans[-1])),
        "ranks 0 and 1 have restored different states": error_of(resumed.plan, _batch(60)),
    }
    for message, error in errors.items():
        assert message in error


def _warnings(settings: dict[str, Any], recorded: int, speeds: Sequence[float]) -> list[str]:
    with warnings_of("commons.extensions.learned_costs") as told:
        shuffler = _learning(**settings)
        _train(shuffler, 0, recorded, speeds, lengths=(900, 1100))
        for _ in range(120 - recorded):
            shuffler.plan(_batch(0))
    return list(told)


SLOWER = "rank 1 on .* times as fast as the median rank: its GPU or host is slow"
MISSING = r".*for 50 plans, and learns nothing from them; they are missing from ranks \[0, 1\]"


@pytest.mark.parametrize(
    ("settings", "recorded", "speeds", "expected"),
    [
        ({"equal_rows": True}, 120, (1.0, 0.5), [SLOWER]),
        ({}, 120, (1.0, 0.5), [SLOWER]),
        ({"partitioner": "refined"}, 120, (1.0, 1.0, 2.0), []),
        ({}, 0, (1.0, 0.5), [MISSING]),
        ({}, 40, (1.0, 1.0), [MISSING]),
    ],
)
def test_slow_ranks_and_missing_times_are_said_once(pools, settings, recorded, speeds, expected):
    told, *others = pools(len(speeds)).run(_warnings, settings, recorded, speeds)
    assert others == [[]] * len(others) and len(told) == len(expected)
    assert all(map(re.match, expected, sorted(told, reverse=True)))


@on_ranks(3)
def test_a_group_without_a_first_batch_gets_a_row_of_another():
    pairs, rank = [dist.new_group(ranks) for ranks in ([0, 2], [1])], dist.get_rank()
    shuffler = _learning(pairs[rank % 2])
    shuffler.plan_over(RankGroup.of())
    batch = _batch(0) if rank == 1 else None
    plan = shuffler.plan(batch)
    assert plan.whole.has_batch
    assert shuffler.plan(_batch(0)).has_batch  # later they have
    given = shuffler.padding_batch() if batch is None else batch
    assert len(given["length"]) == (ROWS if rank == 1 else 1)
