"""`BatchShuffler.scale`, in a custom training loop."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from commons.warn_once import warn_once
from tests.commons.distributed.counted_collectives import no_synchronization
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.pipeline.scored_samples import (
    ScoredShuffler,
    Scorer,
    UnmovedShuffler,
    draw,
    gradients_of,
    on_whole_batch,
    samples_of,
)
from tests.on_ranks import on_ranks

ROWS = (5, 2)


def _shuffler(who):
    if who == "identity":
        return UnmovedShuffler("dict")
    if who == "within pairs":
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        return ScoredShuffler("dict", process_group=pairs[dist.get_rank() // 2])
    return ScoredShuffler("dict")


def _step(who, reduction, gradients, rows):
    """Returns the gradients of an optimizer step of one batch, or of several that are accumulated."""
    shuffler, model = _shuffler(who), Scorer("dict", reduction)
    batches = [draw("dict", samples_of(dist.get_rank(), of_step, step)) for step, of_step in enumerate(rows)]
    steps = [*shuffler.plan_ahead(batches)]
    plans = [plan for _, plan in steps]
    for batch, plan in steps:
        loss, _ = model(shuffler.exchange(batch, plan))
        shuffler.scale(loss, plan, reduction, gradients, plans if len(plans) > 1 else None).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if gradients == "mean":
            parameter.grad /= dist.get_world_size()
    return gradients_of(model)


def _check(results, rows):
    samples = [
        sample
        for step, of_step in enumerate(rows)
        for sample in range(1000 * step, 1000 * step + sum(of_step))
    ]
    expected = on_whole_batch(samples)
    for got in results:
        for one, other in zip(got, expected, strict=True):
            assert float((one - other).norm()) <= 1e-5 * float(other.norm())


ALL, EACH = ["all ranks", "identity"], ["sum", "mean"]
# By number of ranks: which balance, reduction, gradients, and the rows that ranks load for an optimizer step.
CASES = {
    2: [
        *product(ALL, [*EACH, "global_mean"], ["mean", "sum"], [[(5, 2)]]),
        *product(ALL, EACH, ["mean"], [[(5, 2), (1, 4), (3, 3)]]),
    ],
    4: [*product(["within pairs"], ["mean"], ["mean"], [[(5, 2, 1, 3)], [(5, 2, 1, 3), (1, 1, 4, 4)]])],
}


def _steps(cases):
    return [_step(*case) for case in cases]


@pytest.mark.parametrize("num_ranks", CASES)
def test_a_custom_loop_learns_the_global_mean_with_and_without_accumulation(pools, num_ranks):
    cases = CASES[num_ranks]
    for case, results in zip(cases, zip(*pools(num_ranks).run(_steps, cases), strict=True), strict=True):
        _check(results, case[-1])


@on_ranks(2)
def test_wrong_calls_are_refused():
    shuffler = ScoredShuffler("dict")
    batch = draw("dict", samples_of(dist.get_rank(), ROWS))
    plan, other = shuffler.plan(batch), shuffler.plan(batch)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="scale got a plan that was not exchanged"):
        shuffler.scale(loss, plan, "sum")
    shuffler.exchange(batch, plan)
    assert shuffler.scale(loss, plan, None) is loss
    calls = {
        "loss_reduction='average': expected": (loss, plan, "average"),
        r"losses of shape \(3,\), but 'mean' is one number": (torch.ones(3), plan, "mean"),
        "gradients='median': expected": (loss, plan, "mean", "median"),
        "plan is not among step_plans": (loss, plan, "mean", "mean", [other]),
        "covers one batch, but step_plans has 2": (loss, plan, "global_mean", "mean", [plan, other]),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            shuffler.scale(*call)


@pytest.mark.parametrize("how", ["forgotten", "not trained", "scaled", "unscaled", "evaluation", "in fours"])
@on_ranks(2)
def test_one_warning_on_rank_0_tells_of_a_forgotten_scale(how):
    shuffler, plans = ScoredShuffler("dict"), []
    warn_once.cache_clear()
    with warnings_of("commons.distributed.loss") as messages:
        for step in range(12):
            batch = draw("dict", samples_of(dist.get_rank(), ROWS, step))
            with torch.set_grad_enabled(how != "evaluation"):
                plan = shuffler.plan(batch)
                loss, _ = Scorer("dict", "mean")(shuffler.exchange(batch, plan))
            plans.append(plan)
            if how in ("scaled", "not trained", "unscaled"):
                scaled = shuffler.scale(loss, plan, None if how == "unscaled" else "mean")
                loss = loss if how == "not trained" else scaled
            elif how == "in fours" and step % 4 == 3:
                loss = shuffler.scale(loss, plan, "mean", step_plans=plans[-4:])
            if loss.requires_grad:
                loss.backward()
    assert len(messages) == (how in ("forgotten", "not trained") and dist.get_rank() == 0)
    assert all("their losses may not have been scaled" in message for message in messages)


@pytest.mark.parametrize("who", ["all", "within pairs"])
@on_ranks(4)
def test_scale_does_not_wait(who):
    shuffler = _shuffler(who)
    batch = draw("dict", samples_of(dist.get_rank(), (5, 4, 3, 6), 0))
    plan, loss = shuffler.plan(batch), torch.ones((), requires_grad=True)
    shuffler.exchange(batch, plan)
    with no_synchronization():
        for reduction in ("sum", "mean", "global_mean"):
            shuffler.scale(loss, plan, reduction)
