"""Partners of the stage: TorchRec's pipelines, their arguments, threads, a default device."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    train_pipelines,
)
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from commons.distributed import IdentityShuffler
from commons.pipeline import ShuffleStageMixin
from commons.pipeline.shuffle_stage import _warn_of_mode
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.commons.histories import TokenShuffler, draw_histories
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    pipeline_of,
    ranking_pipeline,
    sharded_ranking_model,
    steps_of,
)
from tests.on_ranks import on_ranks

ROWS = 4


def batches(count: int = 5, seed: int = 0) -> list[Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [draw_histories(np.random.default_rng((seed, rank, number)), ROWS) for number in range(count)]


def _local(value: Any) -> torch.Tensor:
    return (
        torch.cat([shard.tensor for shard in value.local_shards()])
        if hasattr(value, "local_shards")
        else value
    )


# Older versions have fewer.
MAYBE = ("TrainPipelineSemiSync", "TrainPipelineFusedSparseDist", "TrainPipelineSparseDistLite")
REFUSED = [TrainPipelineBase, EvalPipelineSparseDist, StagedTrainPipeline, object]
REFUSED += [getattr(train_pipelines, name) for name in MAYBE if hasattr(train_pipelines, name)]


@pytest.mark.parametrize("base", REFUSED)
def test_the_mixin_names_the_pipelines_that_it_works_on(base):
    over = type("Over", (ShuffleStageMixin, base), {})
    with pytest.raises(TypeError, match="derive it from TrainPipelineSparseDist or PrefetchTrainPipeline"):
        over(torch.nn.Linear(1, 1), None, CPU, None, "sum")


def test_a_pipeline_in_front_of_the_mixin_is_refused():
    with pytest.raises(TypeError, match=r"write class Behind\(ShuffleStageMixin, TrainPipelineSparseDist\)"):
        type("Behind", (TrainPipelineSparseDist, ShuffleStageMixin), {})


class CopiesByItself(TrainPipelineSparseDist):
    def copy_batch_to_gpu(self, dataloader_iter):
        return next(dataloader_iter), self._create_context()


class OverCopies(ShuffleStageMixin, CopiesByItself):
    pass


@on_ranks(2)
def test_a_pipeline_that_reads_past_the_stage_is_refused():
    pipeline = OverCopies(*sharded_ranking_model(), CPU, TokenShuffler(), "sum")
    with pytest.raises(TypeError, match=r"must take batches from self\._next_batch"):
        pipeline.progress(iter(batches()))


class EnqueuesByItself(TrainPipelineSparseDist):
    def enqueue_batch(self, dataloader_iter):
        batch = next(dataloader_iter, None)
        if batch is None:
            return False
        self.batches.append(batch)
        self.contexts.append(self._create_context())
        self._pipeline_model(batch, self.contexts[-1]) if not self._pipelined_modules else None
        self.start_sparse_data_dist(batch, self.contexts[-1])
        return True


class OverEnqueues(ShuffleStageMixin, EnqueuesByItself):
    pass


@on_ranks(2)
def test_a_pipeline_that_enqueues_what_it_reads_itself_is_refused():
    pipeline = OverEnqueues(*sharded_ranking_model(), CPU, TokenShuffler(), "sum")
    with pytest.raises(TypeError, match=r"must take batches from self\._next_batch"):
        pipeline.progress(iter(batches()))


class CallsTheModel(TrainPipelineSparseDist):
    def progress(self, dataloader_iter):
        self._model_fwd = self._model
        return super().progress(dataloader_iter)


class OverCalls(ShuffleStageMixin, CallsTheModel):
    pass


@on_ranks(2)
def test_a_pipeline_that_calls_the_model_past_the_stage_is_refused():
    pipeline = OverCalls(*sharded_ranking_model(), CPU, TokenShuffler(), "sum")
    with pytest.raises(TypeError, match=r"call self\._model_fwd\(batch\)"):
        pipeline.progress(iter(batches()))


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


@contextmanager
def process_wide_state_restored() -> Iterator[None]:
    """TorchRec keeps one of its pipeline's options on a class."""
    before = getattr(PipelinedForward, "_use_main_stream_for_dist_init", False)
    try:
        yield
    finally:
        PipelinedForward._use_main_stream_for_dist_init = before


def losses_and_tables(pipeline: Any, model: Any, count: int) -> tuple[list[float], list[torch.Tensor]]:
    losses = []
    loader = iter(batches(count))
    while True:
        try:
            output = pipeline.progress(loader)
        except StopIteration:
            break
        losses.append(float(output.values().double().sum()))
    return losses, [_local(value).clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("argument", PASSED_ON)
@on_ranks(2)
def test_arguments_do_what_they_do_with_torchrec_alone(argument):
    given = {argument: PASSED_ON[argument]}
    tokens = [sum_over_ranks(int(batch.num_loss_tokens().sum())) for batch in batches()]
    with process_wide_state_restored():
        model, optimizer = sharded_ranking_model()
        scales = iter([dist.get_world_size() / max(count, 1) for count in tokens])

        def forward(batch: Any) -> tuple[torch.Tensor, Any]:
            losses, output = model(batch)
            return losses.sum() * next(scales), output

        alone = TrainPipelineSparseDist(model, optimizer, CPU, custom_model_fwd=forward, **given)
        expected = losses_and_tables(alone, model, 5)
        model, optimizer = sharded_ranking_model()
        shuffler = IdentityShuffler(get_workloads=lambda batch: batch.num_tokens())
        got = losses_and_tables(pipeline_of("native", model, optimizer, shuffler, **given), model, 5)
        assert got[0] == pytest.approx(expected[0], rel=1e-6) and len(got[0]) == 5
        for one, other in zip(got[1], expected[1], strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
        model, optimizer = sharded_ranking_model()
        balanced = losses_and_tables(
            pipeline_of("native", model, optimizer, TokenShuffler(), **given), model, 5
        )
        for one, other in zip(balanced[1], expected[1], strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def sum_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_a_detached_pipeline_goes_on_once_it_is_attached(name):
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
    assert all(
        "use a second pipeline object on the same model for evaluation" in record for record in records
    )


ACCUMULATION = "torchrec.distributed.train_pipeline.gradient_accumulation"


@pytest.mark.skipif(find_spec(ACCUMULATION) is None, reason="this version of TorchRec has none")
@on_ranks(2)
def test_torchrecs_gradient_accumulation_trains_as_on_its_own_pipeline():
    accumulation = importlib.import_module(ACCUMULATION)
    config = accumulation.GradientAccumulationConfig(is_enabled=True, num_steps=2)
    tokens = [sum_over_ranks(int(batch.num_loss_tokens().sum())) for batch in batches(6)]
    scales = iter([dist.get_world_size() / count for count in tokens])
    results = []
    for balanced in (False, True):
        model, optimizer = sharded_ranking_model()

        def forward(batch: Any, model: Any = model) -> tuple[torch.Tensor, Any]:
            losses, output = model(batch)
            return losses.sum() * next(scales), output

        pipeline = (
            pipeline_of("native", model, optimizer, TokenShuffler())
            if balanced
            else TrainPipelineSparseDist(model, optimizer, CPU, custom_model_fwd=forward)
        )
        wrapped = accumulation.GradientAccumulationWrapper(pipeline, optimizer, model, config)
        losses_and_tables(wrapped, model, 6)
        results.append([_local(value).clone() for value in model.state_dict().values()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_without_executing_all_batches_the_last_ones_wait_for_the_next_epoch():
    runs = []
    for balanced in (False, True):
        model, optimizer = sharded_ranking_model()

        def forward(batch: Any, model: Any = model) -> tuple[torch.Tensor, Any]:
            losses, output = model(batch)
            return 0.0 * losses.sum(), output

        if balanced:
            shuffler = IdentityShuffler(get_workloads=lambda batch: batch.num_tokens())
            pipeline = pipeline_of("native", model, optimizer, shuffler, execute_all_batches=False)
        else:
            pipeline = TrainPipelineSparseDist(
                model, optimizer, CPU, custom_model_fwd=forward, execute_all_batches=False
            )
        model.eval()
        runs.append([losses_and_tables(pipeline, model, 5)[0] for _ in range(3)])
    assert [len(of) for of in runs[1]] == [len(of) for of in runs[0]]
    for one, other in zip(*runs, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@on_ranks(2)
def test_evaluation_by_a_pipeline_of_another_kind_is_refused_until_the_first_is_detached():
    model, optimizer = sharded_ranking_model()
    training = pipeline_of("native", model, optimizer, TokenShuffler())
    evaluation = pipeline_of("none", model, optimizer, TokenShuffler())
    loader = iter(batches(6))
    training.progress(loader)
    message = error_of(lambda: evaluation.progress(iter(batches(2))))
    assert message.startswith("RuntimeError: another pipeline has taken over a ShardedEmbedding"), message
    training.progress(loader)
    training.detach()
    model.eval()
    evaluation.progress(iter(batches(2)))
    evaluation.reset()
