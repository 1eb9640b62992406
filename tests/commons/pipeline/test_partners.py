"""Partners of the stage: TorchRec's pipelines, their arguments and wrappers, threads, a default device."""

from __future__ import annotations

import importlib
import inspect
import itertools
import threading
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchrec.distributed.train_pipeline as torchrec_pipelines
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from commons.distributed import BatchShuffler, IdentityShuffler
from commons.pipeline.shuffle_stage import _warn_of_mode
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.click_models import shards_of
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    pipeline_of,
    ranking_pipeline,
    sharded_ranking_model,
    steps_of,
)
from tests.on_ranks import on_ranks

ROWS = 4
Learned = tuple[list[float], list[torch.Tensor]]  # outputs of steps, and tables


def batches(count: int = 5, seed: int = 0) -> list[Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [draw_histories(np.random.default_rng((seed, rank, number)), ROWS) for number in range(count)]


def identity() -> BatchShuffler:
    return IdentityShuffler(get_workloads=lambda batch: batch.num_tokens())


def scales_of(count: int) -> Iterator[float]:
    """Yields for each step what makes the loss of a rank that of the mean over all loss tokens."""
    tokens = torch.tensor([int(batch.num_loss_tokens().sum()) for batch in batches(count)])
    dist.all_reduce(tokens)
    return iter((dist.get_world_size() / tokens.clamp(min=1)).tolist())


def torchrecs(model: Any, optimizer: Any, scales: Iterator[float], **given: Any) -> Any:
    """Returns TorchRec's own pipeline, with losses of these scales."""

    def forward(batch: Any) -> tuple[torch.Tensor, Any]:
        losses, output = model(batch)
        return losses.sum() * next(scales), output

    return TrainPipelineSparseDist(model, optimizer, CPU, custom_model_fwd=forward, **given)


def outputs_of(pipeline: Any, loader: Iterable[Any]) -> list[Any]:
    """Returns what a pipeline returns until its loader ends."""
    iterator, outputs = iter(loader), []
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs


def learned_by(pipeline: Any, model: Any, count: int) -> Learned:
    outputs = outputs_of(pipeline, batches(count))
    return [float(output.values().double().sum()) for output in outputs], list(shards_of(model).values())


def check_alike(one: Learned, other: Learned, balanced: bool = False) -> None:
    """Checks outputs, unless balancing moves their samples, and tables."""
    assert len(one[0]) == len(other[0])
    assert balanced or one[0] == pytest.approx(other[0], rel=1e-6)
    rtol, atol = (1e-4, 1e-6) if balanced else (1e-5, 1e-7)
    for table, of_other in zip(one[1], other[1], strict=True):
        assert torch.allclose(table, of_other, rtol=rtol, atol=atol)


class OtherContext(torchrec_pipelines.TrainPipelineContext):
    """TorchRec's context of a batch, as users extend it."""


# Arguments that are passed on, and another value than the default where there is one on a CPU;
# `execute_all_batches=False` has a test of its own.
PASSED_ON: dict[str, Any] = {
    "execute_all_batches": True,
    "apply_jit": True,
    "context_type": OtherContext,
    "pipeline_postproc": True,
    "dmp_collection_sync_interval_batches": None,
    "enqueue_batch_after_forward": True,
    "free_features_storage_early": True,
    "clear_data_dist_inputs": True,
}
KNOWN = inspect.signature(TrainPipelineSparseDist.__init__).parameters
PASSED_ON = {name: value for name, value in PASSED_ON.items() if name in KNOWN}  # older versions have fewer
OURS_OR_REFUSED = {"self", "model", "optimizer", "device", "custom_model_fwd", "enable_inplace_copy_batch"}


def test_every_argument_of_torchrecs_pipelines_is_passed_on_or_refused():
    for pipeline in (TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist):
        assert set(inspect.signature(pipeline.__init__).parameters) <= PASSED_ON.keys() | OURS_OR_REFUSED


@pytest.mark.parametrize("argument", PASSED_ON)
@on_ranks(2)
def test_arguments_do_what_they_do_with_torchrec_alone(argument):
    given = {argument: PASSED_ON[argument]}
    with pytest.MonkeyPatch.context() as patch:
        # TorchRec keeps one of its pipeline's options on a class.
        patch.setattr(PipelinedForward, "_use_main_stream_for_dist_init", False, raising=False)
        model, optimizer = sharded_ranking_model()
        expected = learned_by(torchrecs(model, optimizer, scales_of(5), **given), model, 5)
        assert len(expected[0]) == 5
        for shuffler in (identity(), TokenShuffler()):
            model, optimizer = sharded_ranking_model()
            got = learned_by(pipeline_of("native", model, optimizer, shuffler, **given), model, 5)
            check_alike(got, expected, balanced=isinstance(shuffler, TokenShuffler))


@on_ranks(2)
def test_without_executing_all_batches_the_last_ones_wait_for_the_next_epoch():
    runs = []
    for with_stage in (False, True):
        model, optimizer = sharded_ranking_model()
        pipeline = (
            pipeline_of("native", model, optimizer, identity(), execute_all_batches=False)
            if with_stage
            else torchrecs(model, optimizer, itertools.repeat(0.0), execute_all_batches=False)
        )
        model.eval()
        runs.append([learned_by(pipeline, model, 5) for _ in range(3)])
    for one, other in zip(*runs, strict=True):
        check_alike(one, other)


ACCUMULATION = "torchrec.distributed.train_pipeline.gradient_accumulation"


@pytest.mark.skipif(find_spec(ACCUMULATION) is None, reason="this version of TorchRec has none")
@on_ranks(2)
def test_torchrecs_gradient_accumulation_trains_as_on_its_own_pipeline():
    accumulation = importlib.import_module(ACCUMULATION)
    config = accumulation.GradientAccumulationConfig(is_enabled=True, num_steps=2)
    results = []
    for with_stage in (False, True):
        model, optimizer = sharded_ranking_model()
        pipeline = (
            pipeline_of("native", model, optimizer, TokenShuffler())
            if with_stage
            else torchrecs(model, optimizer, scales_of(6))
        )
        wrapped = accumulation.GradientAccumulationWrapper(pipeline, optimizer, model, config)
        results.append(learned_by(wrapped, model, 6))
    check_alike(*results, balanced=True)


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_a_detached_pipeline_goes_on_once_it_is_attached_to_its_model(name):
    model, optimizer = sharded_ranking_model()
    pipeline, loader = pipeline_of(name, model, optimizer, TokenShuffler()), iter(batches(4))
    pipeline.progress(loader)
    if name == "none":
        assert pipeline.detach() is model
        pipeline.attach(model)
    pipeline.progress(loader)
    with pytest.raises(ValueError, match="make a new pipeline, with a new shuffler, for another model"):
        pipeline.attach(torch.nn.Linear(1, 1))
    assert len(list(steps_of(pipeline, loader))) == 2


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_pipelines_run_in_a_thread_and_beside_another_default_device(name):
    def losses(seed: int) -> list[float]:
        pipeline = ranking_pipeline(name, TokenShuffler())
        return [float(loss_sum) for loss_sum, _, _ in steps_of(pipeline, batches(3, seed))]

    expected, found = losses(0), []
    thread = threading.Thread(target=lambda: found.extend(losses(0)))
    thread.start()
    thread.join()
    assert found == expected
    pipeline, loaded = ranking_pipeline(name, TokenShuffler()), batches(3)
    torch.set_default_device("meta")
    try:
        assert [float(loss_sum) for loss_sum, _, _ in steps_of(pipeline, loaded)] == expected
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_batches_that_run_in_another_mode_than_they_were_loaded_for_are_named(name):
    _warn_of_mode.cache_clear()
    model, optimizer = sharded_ranking_model()
    pipeline, loader = pipeline_of(name, model, optimizer, TokenShuffler()), iter(batches(6))
    with warnings_of("commons") as records:
        pipeline.progress(loader)
        assert not records
        model.eval()
        for _ in range(3):
            pipeline.progress(iter(batches(3)))
    pipeline.reset()
    assert len(records) == (dist.get_rank() == 0)
    assert all("use a second pipeline object" in record for record in records)


@on_ranks(2)
def test_evaluation_by_a_pipeline_of_another_kind_is_refused_until_the_first_is_detached():
    model, optimizer = sharded_ranking_model()
    training = pipeline_of("native", model, optimizer, TokenShuffler())
    evaluation = pipeline_of("none", model, optimizer, TokenShuffler())
    loader = iter(batches(6))
    training.progress(loader)
    with pytest.raises(RuntimeError, match="another pipeline has taken over a ShardedEmbedding"):
        evaluation.progress(iter(batches(2)))
    training.progress(loader)
    training.detach()
    model.eval()
    evaluation.progress(iter(batches(2)))
    evaluation.reset()


def total_of(outputs: Iterable[Any]) -> float:
    """Returns the sum of what a model computes for the samples of all ranks."""
    total = sum(output.values().double().sum() for output in outputs)
    dist.all_reduce(total)
    return float(total)


@on_ranks(2)
def test_evaluation_pipelines_between_steps_agree_and_do_not_disturb_training():
    losses = []
    for evaluates in (False, True):
        model, optimizer = sharded_ranking_model(0.1)
        torchrecs_own = EvalPipelineSparseDist(model, optimizer, CPU)
        balanced = pipeline_of("native", model, optimizer, TokenShuffler())
        losses.append([])
        for loss_sum, *_ in steps_of(pipeline_of("native", model, optimizer, TokenShuffler()), batches(4)):
            losses[-1].append(float(loss_sum))
            if evaluates:
                model.eval()
                with torch.no_grad():
                    expected, found = (
                        outputs_of(pipeline, batches(2, seed=1)) for pipeline in (torchrecs_own, balanced)
                    )
                assert [len(output.lengths()) for output in expected] == [ROWS] * len(found)
                assert total_of(found) == pytest.approx(total_of(expected), rel=1e-5)
                torchrecs_own.reset()
                model.train()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
