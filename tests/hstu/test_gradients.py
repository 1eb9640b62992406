"""The shuffler does not change what a step learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.datasets import HSTUBatch
from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops
from commons.pipeline import TrainPipelineFactory
from commons.training import OptimizerArgs, shard_model
from hstu import batch_shuffler  # noqa: F401
from tests.hstu.hstu_samples import NUM_CLASSES, VOCABULARY, Sample, hstu_batch, ranking_model

# So large that rounding of the parameter does not show in the difference that a step makes to it.
LEARNING_RATE = 1e4
ROWS = 6


def _samples(rank: int, num_real: int, labelled: bool) -> list[Sample]:
    """A rank's samples, of very different lengths, the long ones on the first rank."""
    rng = np.random.default_rng(rank)

    def sample(items: int) -> Sample:
        ids, actions = rng.integers(0, VOCABULARY, items), rng.integers(0, NUM_CLASSES, items)
        return Sample(
            user=[int(rng.integers(0, VOCABULARY))],
            tags=rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist(),
            items=ids.tolist(),
            actions=actions.tolist(),
            num_candidates=0,
            labels=actions.tolist() if labelled else [],
        )

    longest = 40 if rank == 0 else 8
    return [sample(int(items)) for items in rng.integers(0, longest, num_real)]


def _batch(num_real: int, labelled: bool) -> HSTUBatch:
    """This rank's batch."""
    samples = _samples(dist.get_rank(), num_real, labelled)
    empty = Sample([], [], [], [], 0, [])
    batch = hstu_batch(samples + [empty] * (ROWS - num_real))
    batch.actual_batch_size = num_real
    return batch


def _step(pipeline_name: str, shuffler_name: str, batch: HSTUBatch) -> tuple[dict[str, torch.Tensor], float]:
    """What one step takes off each parameter that this rank holds, and the step's global loss."""
    device = torch.device("cpu")
    model, optimizer = shard_model(ranking_model(), OptimizerArgs("sgd", LEARNING_RATE), device)
    arguments = {"flops": HSTUFlops(2, 16, 2, 4)} if shuffler_name == "hstu" else {}
    shuffler = BatchShufflerFactory.create(shuffler_name, **arguments)
    pipeline = TrainPipelineFactory.create(
        pipeline_name, model=model, optimizer=optimizer, device=device, batch_shuffler=shuffler
    )
    before = _parameters(model)
    loss_sum, loss_tokens, _ = pipeline.progress(iter([batch]))
    dist.all_reduce(loss_sum)
    if shuffler_name == "hstu":
        assert pipeline.report.imbalance_after < pipeline.report.imbalance_before
        assert pipeline.report.samples_moved > 0
    after = _parameters(model)
    return {name: before[name] - after[name] for name in before}, float(loss_sum) / max(loss_tokens, 1)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    local = {}
    for name, value in model.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else [value]
        for shard in shards:
            tensor = shard.tensor if hasattr(shard, "tensor") else shard
            local[name] = tensor.detach().double().clone()
    return local


def _compare(pipeline_name: str, num_real: tuple[int, ...], labelled: bool):
    """Per parameter, squared norms of the gradient and of its difference; and both losses."""
    batch = _batch(num_real[dist.get_rank()], labelled)
    plain, plain_loss = _step(pipeline_name, "identity", batch)
    shuffled, shuffled_loss = _step(pipeline_name, "hstu", batch)
    norms = {
        name: (float(plain[name].square().sum()), float((plain[name] - shuffled[name]).square().sum()))
        for name in plain
    }
    return norms, (plain_loss, shuffled_loss)


@pytest.mark.parametrize("pipeline_name", ["none", "native"])
@pytest.mark.parametrize(
    ("num_real", "labelled"),
    [((6, 6), True), ((6, 3), True), ((5, 0), True), ((6, 5), False), ((4, 6, 1), True)],
    ids=["complete", "incomplete", "one rank empty", "no loss tokens", "three ranks"],
)
def test_gradients_are_equal_with_and_without_the_shuffler(pools, pipeline_name, num_real, labelled):
    results = pools(len(num_real)).run(_compare, pipeline_name, num_real, labelled)
    names = {name for norms, _ in results for name in norms}
    assert any("embedding_collections" in name for name in names)
    assert any("dense" in name for name in names)
    for name in names:
        squared = sum(norms[name][0] for norms, _ in results if name in norms)
        difference = sum(norms[name][1] for norms, _ in results if name in norms)
        assert (squared > 0) == labelled, name
        assert difference <= 1e-10 * squared, (name, (difference / max(squared, 1e-300)) ** 0.5)
    for _, (plain_loss, shuffled_loss) in results:
        assert plain_loss == pytest.approx(shuffled_loss, rel=1e-5)


def _against_one_process(num_real: tuple[int, ...]) -> dict[str, float]:
    """Relative difference of dense gradients from those of the mean loss of all samples in one process."""
    steps, _ = _step("native", "hstu", _batch(num_real[dist.get_rank()], labelled=True))
    model = ranking_model()
    loss_sum, output = model(
        hstu_batch([sample for rank, real in enumerate(num_real) for sample in _samples(rank, real, True)])
    )
    (loss_sum / len(output.labels)).backward()
    gradients = {name: parameter.grad.double() for name, parameter in model.dense.named_parameters()}
    return {
        name: float((step / LEARNING_RATE - gradients[name.partition("dense.")[2]]).norm())
        / float(gradients[name.partition("dense.")[2]].norm())
        for name, step in steps.items()
        if "dense." in name
    }


def test_gradients_are_those_of_the_mean_over_all_loss_tokens(pools):
    for differences in pools(2).run(_against_one_process, (6, 3)):
        assert len(differences) > 10
        assert max(differences.values()) < 1e-5
