"""A loop of one's own: `BatchShuffler.scale`."""

from __future__ import annotations

import logging
from itertools import islice, product

import pytest
import torch
import torch.distributed as dist

from commons.distributed import IdentityShuffler
from tests.commons.pipeline.scored_samples import (
    ScoredShuffler,
    Scorer,
    draw,
    gradients_of,
    on_whole_batch,
    samples_of,
)

ROWS = (5, 2)
ACCUMULATED = [(5, 2), (1, 4), (3, 3)]


def _shuffler(who, kind="dict"):
    if who == "identity":
        return IdentityShuffler(get_loss_tokens=lambda batch: batch["more"]["targets"].lengths())
    if who == "within pairs":
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        return ScoredShuffler(kind, process_group=pairs[dist.get_rank() // 2])
    return ScoredShuffler(kind)


def _reduced(model, gradients):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if gradients == "mean":
            parameter.grad /= dist.get_world_size()
    return gradients_of(model)


def _step(who, reduction, gradients, rows, kind="dict"):
    """Gradients of one optimizer step of one batch, or of several that are accumulated."""
    shuffler = _shuffler(who, kind)
    model = Scorer(kind, reduction)
    batches = [draw(kind, samples_of(dist.get_rank(), of_step, step)) for step, of_step in enumerate(rows)]
    steps = shuffler.plan_ahead(batches)
    while group := list(islice(steps, len(rows))):
        plans = [plan for _, plan in group]
        for batch, plan in group:
            loss, _ = model(shuffler.exchange(batch, plan))
            shuffler.scale(loss, plan, reduction, gradients, plans if len(plans) > 1 else None).backward()
    return _reduced(model, gradients)


def _check(results, rows):
    samples = [
        sample
        for step, of_step in enumerate(rows)
        for sample in range(1000 * step, 1000 * step + sum(of_step))
    ]
    _, _, expected = on_whole_batch(samples)
    for got in results:
        for one, other in zip(got, expected, strict=True):
            assert float((one - other).norm()) <= 1e-5 * float(other.norm())


@pytest.mark.parametrize("who", ["all ranks", "identity"])
@pytest.mark.parametrize(
    ("reduction", "gradients"), list(product(["sum", "mean", "global_mean"], ["mean", "sum"]))
)
def test_a_step_of_ones_own_loop(pools, who, reduction, gradients):
    _check(pools(2).run(_step, who, reduction, gradients, [ROWS]), [ROWS])


@pytest.mark.parametrize("who", ["all ranks", "identity"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_accumulated_gradients(pools, who, reduction):
    _check(pools(2).run(_step, who, reduction, "mean", ACCUMULATED), ACCUMULATED)


@pytest.mark.parametrize("rows", [[(5, 2, 1, 3)], [(5, 2, 1, 3), (1, 1, 4, 4)]])
def test_ranks_that_balance_in_pairs_count_the_tokens_of_all(pools, rows):
    _check(pools(4).run(_step, "within pairs", "mean", "mean", rows), rows)


def _errors():
    shuffler = ScoredShuffler("dict")
    batch = draw("dict", samples_of(dist.get_rank(), ROWS))
    plan, other = shuffler.plan(batch), shuffler.plan(batch)
    loss = torch.ones((), requires_grad=True)
    calls = [
        (loss, plan, "average"),
        (torch.ones(3), plan, "mean"),
        (loss, plan, "mean", "median"),
        (loss, plan, "mean", "mean", [other]),
        (loss, plan, "global_mean", "mean", [plan, other]),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            shuffler.scale(*call)
        messages.append(str(error.value))
    assert shuffler.scale(loss, plan, None) is loss
    return messages


def test_wrong_calls_are_told(pools):
    for messages in pools(2).run(_errors):
        unknown, vector, gradients, foreign, accumulated = messages
        assert unknown.startswith("loss_reduction='average': expected")
        assert "losses of shape (3,), and 'mean' is one number" in vector
        assert gradients.startswith("gradients='median': expected")
        assert foreign.startswith("plan is not among step_plans")
        assert '"global_mean" is of one batch, and step_plans has 2' in accumulated


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _warnings(how):
    heard = Heard()
    logger = logging.getLogger("commons.distributed.loss_reduction")
    logger.addHandler(heard)
    shuffler = ScoredShuffler("dict")
    for step in range(4):
        batch = draw("dict", samples_of(dist.get_rank(), ROWS, step))
        with torch.set_grad_enabled(how != "evaluation"):
            plan = shuffler.plan(batch)
            loss, _ = Scorer("dict", "mean")(shuffler.exchange(batch, plan))
        if how in ("scaled", "own"):
            shuffler.scale(loss, plan, "mean" if how == "scaled" else None)
    logger.removeHandler(heard)
    return heard.messages


@pytest.mark.parametrize(("how", "times"), [("forgotten", 1), ("scaled", 0), ("own", 0), ("evaluation", 0)])
def test_a_forgotten_scale_is_told_once_on_rank_0(pools, how, times):
    on_rank_0, elsewhere = pools(2).run(_warnings, how)
    assert len(on_rank_0) == times and elsewhere == []
    assert all("their losses not scaled" in message for message in on_rank_0)
