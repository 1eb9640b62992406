"""Any container, loss reduction and number of rows: what one process with the whole batch learns."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.distributed import IdentityShuffler
from commons.distributed.loss_reduction import loss_sum
from commons.pipeline import TrainPipelineFactory
from tests.commons.pipeline.scored_samples import (
    MAKE,
    ScoredShuffler,
    Scorer,
    ddp,
    draw,
    gradients_of,
    on_whole_batch,
    samples_of,
)

CPU = torch.device("cpu")
# (3, 2) and (6, 5): the ranks do not divide the rows. (1, 1, 0): a rank gets no sample at all.
UNEVEN = [(6, 5), (3, 2)]
WITHOUT_SAMPLES = (1, 1, 0)


def pipeline_of(kind, reduction, learning_rate=0.0, **settings):
    model = ddp(Scorer(kind, reduction))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    shuffler = ScoredShuffler(kind, **settings)
    pipeline = TrainPipelineFactory.create(
        "none",
        model=model,
        optimizer=optimizer,
        device=CPU,
        batch_shuffler=shuffler,
        loss_reduction=reduction,
    )
    return pipeline, model


def _step(kind, reduction, rows, settings):
    """Mean loss, loss tokens and gradients of a step; collective."""
    pipeline, model = pipeline_of(kind, reduction, verify=True, **settings)
    mine = samples_of(dist.get_rank(), rows)
    loss_sum, tokens, _ = pipeline.progress(iter([draw(kind, mine)] if mine else []))
    pipeline.reset()
    dist.all_reduce(loss_sum)
    return float(loss_sum) / max(tokens, 1), tokens, gradients_of(model), pipeline.num_samples


def _steps(cases):
    return [_step(*case) for case in cases]


def check(results, cases) -> None:
    """Each rank's loss and gradients are those of one process that has the whole batch."""
    for number, (_, _, rows, _) in enumerate(cases):
        loss, tokens, gradients = on_whole_batch(range(sum(rows)))
        assert sum(of_rank[number][3] for of_rank in results) == sum(rows)
        for of_rank in results:
            got_loss, got_tokens, got, _ = of_rank[number]
            assert got_tokens == tokens, cases[number]
            assert got_loss == pytest.approx(loss, rel=1e-5), cases[number]
            for one, other in zip(got, gradients, strict=True):
                assert float((one - other).norm()) <= 1e-5 * float(other.norm()), cases[number]


@pytest.mark.parametrize("kind", sorted(MAKE))
def test_any_container_learns_what_one_process_does(pools, kind):
    cases = [
        (kind, reduction, rows, {"equal_rows": equal_rows})
        for reduction, rows, equal_rows in product(("sum", "mean", "global_mean"), UNEVEN, (True, False))
    ]
    check(pools(2).run(_steps, cases), cases)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tensordict", "base"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_rank_without_samples_adds_nothing(pools, kind, reduction):
    cases = [(kind, reduction, WITHOUT_SAMPLES, {}), (kind, reduction, (0, 5, 0), {"equal_rows": False})]
    check(pools(3).run(_steps, cases), cases)


@pytest.mark.parametrize("kind", ["dict", "named tuple", "base"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_micro_batches_of_any_container(pools, kind, reduction):
    settings = {"max_tokens_per_micro_batch": 12}
    cases = [(kind, reduction, rows, settings) for rows in [*UNEVEN, (7, 0)]]
    check(pools(2).run(_steps, cases), cases)
    cases = [(kind, reduction, WITHOUT_SAMPLES, settings | {"equal_rows": rows}) for rows in (True, False)]
    check(pools(3).run(_steps, cases), cases)


def _window(kind, reduction, rows):
    """Sum of the gradients of two steps planned together, at the same parameters."""
    pipeline, model = pipeline_of(kind, reduction, window=2)
    batches = iter([draw(kind, samples_of(dist.get_rank(), rows, step)) for step in range(2)])
    total = None
    for _ in range(2):
        pipeline.progress(batches)
        of_step = gradients_of(model)
        total = of_step if total is None else [a + b for a, b in zip(total, of_step, strict=True)]
    pipeline.reset()
    return total


@pytest.mark.parametrize("kind", ["dict", "base"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_windows_of_any_container(pools, kind, reduction):
    rows = (5, 2)
    samples = [*range(7), *range(1000, 1007)]
    _, _, gradients = on_whole_batch(samples)
    for got in pools(2).run(_window, kind, reduction, rows):
        for one, other in zip(got, gradients, strict=True):  # two steps of the mean number of tokens
            assert float((one - 2 * other).norm()) <= 2e-5 * float(other.norm())


def _unbalanced_mean(rows):
    """The identity counts loss tokens, too."""
    model = ddp(Scorer("dict", "mean"))
    pipeline = TrainPipelineFactory.create(
        "none",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        device=CPU,
        batch_shuffler=IdentityShuffler(
            get_loss_tokens=lambda batch: batch["more"]["targets"].lengths(),
        ),
        loss_reduction="mean",
    )
    mine = samples_of(dist.get_rank(), rows)
    loss_sum, tokens, _ = pipeline.progress(iter([draw("dict", mine)] if mine else []))
    pipeline.reset()
    dist.all_reduce(loss_sum)
    return [(float(loss_sum) / tokens, tokens, gradients_of(model), pipeline.num_samples)]


@pytest.mark.parametrize("rows", [(6, 5), (4, 0)])
def test_without_balancing_the_mean_is_that_of_all_ranks_too(pools, rows):
    check(pools(2).run(_unbalanced_mean, rows), [("dict", "mean", rows, {})])


class ByThree(nn.Module):
    """Not finite on a row of zeros, as what divides by a length or takes a logarithm is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        losses = (self.weight * batch["x"]).log()
        return losses.mean(), losses


def _three_rows_on_four_ranks():
    class Costs(ScoredShuffler):
        def get_workloads(self, batch):
            return torch.ones(len(batch["x"]), dtype=torch.int64)

        get_loss_tokens = get_workloads

    model = ddp(ByThree())
    pipeline = TrainPipelineFactory.create(
        "none",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        device=CPU,
        batch_shuffler=Costs("x"),
        loss_reduction="mean",
    )
    batches = [{"x": torch.tensor([2.0, 3.0, 4.0])}] if dist.get_rank() == 3 else []
    loss_sum, tokens, _ = pipeline.progress(iter(batches))
    pipeline.reset()
    dist.all_reduce(loss_sum)
    return float(loss_sum) / tokens, float(gradients_of(model)[0]), pipeline.num_samples


def test_more_ranks_than_samples(pools):
    for loss, gradient, _ in pools(4).run(_three_rows_on_four_ranks):
        assert loss == pytest.approx(float(torch.tensor([2.0, 3.0, 4.0]).log().mean()), rel=1e-5)
        assert gradient == pytest.approx(1.0, rel=1e-5)


def _error(reduction, model_reduction=None, rows=(2, 2), **settings):
    try:
        pipeline, _ = pipeline_of("dict", reduction, **settings)
        if model_reduction is not None:
            pipeline._model.module._reduction = model_reduction
        pipeline.progress(iter([draw("dict", samples_of(dist.get_rank(), rows))]))
        pipeline.reset()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "mean"), "ValueError: loss_reduction=None: expected"),
        (("average", "mean"), "ValueError: loss_reduction='average': expected"),
        (("mean", "sum"), "ValueError: the model returned losses of shape ("),
    ],
)
def test_ways_to_get_the_loss_wrong_are_told(pools, arguments, message):
    for error in pools(2).run(_error, *arguments):
        assert error.startswith(message), error


def _global_mean_errors():
    return [
        _error("global_mean", window=2),
        _error("global_mean", max_tokens_per_micro_batch=9),
        _error("global_mean", rows=(1, 0, 1)) if dist.get_rank() != 1 else _no_batch(),
    ]


def _global_mean_of_identity():
    """Only rank 1's own plan has no sample: all ranks stop."""
    model = ddp(Scorer("dict", "global_mean"))
    pipeline = TrainPipelineFactory.create(
        "none",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        device=CPU,
        batch_shuffler=IdentityShuffler(get_loss_tokens=lambda batch: batch["more"]["targets"].lengths()),
        loss_reduction="global_mean",
    )
    batches = iter([draw("dict", [1, 2])] if dist.get_rank() == 0 else [])
    try:
        pipeline.progress(batches)
    except ValueError as error:
        return str(error)
    return "trained"


def test_a_global_mean_without_balancing_is_refused_on_all_ranks(pools):
    for error in pools(2).run(_global_mean_of_identity):
        assert "a rank has no sample in this step" in error


def test_a_vector_of_one_is_no_mean():
    with pytest.raises(ValueError, match=r"losses of shape \(1,\), and 'mean' is one number"):
        loss_sum(torch.ones(1), "mean", 1, 1.0)
    assert float(loss_sum(torch.tensor(torch.nan), "global_mean", 0, 0.0)) == 0


def _no_batch():
    try:
        pipeline, _ = pipeline_of("dict", "global_mean")
        pipeline.progress(iter([]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_global_mean_is_refused_where_it_is_none(pools):
    for window, micro_batches, copied in pools(3).run(_global_mean_errors):
        assert "is for a whole step" in window and "is for a whole step" in micro_batches
        assert "runs a copy of one" in copied
