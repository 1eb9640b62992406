"""Partners of the stage: TorchRec's pipelines, their arguments and wrappers, threads, a default device."""

import importlib
import inspect
import itertools
import threading
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
import torchrec.distributed.train_pipeline as torchrec_pipelines
from packaging.version import Version
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
    train_pipelines,
)
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from commons.distributed import IdentityShuffler
from tests.commons.histories import TokenShuffler
from tests.commons.pipeline.click_models import shards_of
from tests.commons.pipeline.ranking_pipelines import (
    CPU,
    OF_TORCHREC,
    OTHERS,
    loaded_histories,
    on_cpus,
    outputs_of,
    pipeline_of,
    ranking_pipeline,
    sharded_ranking_model,
    steps_of,
)
from tests.on_ranks import on_ranks


def torchrecs(batches: list[Any], model: Any, optimizer: Any, name: str = "native", **given: Any) -> Any:
    """Returns TorchRec's own pipeline, whose losses become the mean over all loss tokens of each step."""
    tokens = torch.tensor([int(batch.num_loss_tokens().sum()) for batch in batches])
    dist.all_reduce(tokens)
    scales = itertools.cycle((dist.get_world_size() / tokens.clamp(min=1)).tolist())

    def forward(batch: Any) -> tuple[torch.Tensor, Any]:
        losses, output = model(batch)
        return losses.sum() * next(scales), output

    base = getattr(train_pipelines, OF_TORCHREC[name])
    return on_cpus(base(model, optimizer, CPU, custom_model_fwd=forward, **given))


def learned_by(pipeline: Any, model: Any, batches: list[Any]) -> list[torch.Tensor]:
    """Trains two epochs; returns the output of each step, and the parameters."""
    outputs = outputs_of(pipeline, batches) + outputs_of(pipeline, batches)
    return [
        torch.stack([output.values().double().sum() for output in outputs]),
        *shards_of(model).values(),
    ]


class OtherContext(torchrec_pipelines.TrainPipelineContext):
    """TorchRec's context of a batch, as users extend it."""


# Arguments that are passed on, and another value than the default where there is one on a CPU.
PASSED_ON: dict[str, Any] = {
    "execute_all_batches": False,
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
OURS_OR_REFUSED |= {"emb_lookup_stream", "inplace_copy_batch_to_gpu"}
OURS_OR_REFUSED |= {"async_inplace_copy"}  # has no effect without enable_inplace_copy_batch
# Pipelines with arguments of their own.
OF_OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("lite", {}),
    ("fused", {}),
    ("fused", {"embedding_lookup_after_data_dist": True}),
    ("semi_sync", {"start_batch": 2, "strict": True}),
    ("semi_sync", {"start_batch": 1, "stash_gradients": True}),
]
GIVEN = [("native", {name: value}) for name, value in PASSED_ON.items()]
GIVEN += [(name, given) for name, given in OF_OTHERS if name in OTHERS]


def test_every_argument_of_torchrecs_pipelines_is_passed_on_or_refused():
    tested = PASSED_ON.keys() | OURS_OR_REFUSED | {argument for _, given in OF_OTHERS for argument in given}
    pipelines = (getattr(train_pipelines, OF_TORCHREC[name]) for name in ("native", *OTHERS))
    for pipeline in (PrefetchTrainPipelineSparseDist, *pipelines):
        assert set(inspect.signature(pipeline.__init__).parameters) <= tested


@pytest.mark.parametrize(("name", "given"), GIVEN)
@on_ranks(2)
def test_pipelines_and_their_arguments_do_what_they_do_with_torchrec_alone(name, given):
    batches = loaded_histories(4)
    with pytest.MonkeyPatch.context() as patch:
        # TorchRec keeps one of its pipeline's options on a class.
        patch.setattr(PipelinedForward, "_use_main_stream_for_dist_init", False, raising=False)
        model, optimizer = sharded_ranking_model()
        expected = learned_by(torchrecs(batches, model, optimizer, name, **given), model, batches)
        # Without executing all batches, the last ones wait for the next epoch.
        assert (len(expected[0]) < 8) == ("execute_all_batches" in given)
        for shuffler in (IdentityShuffler(), TokenShuffler()):
            model, optimizer = sharded_ranking_model()
            got = learned_by(pipeline_of(name, model, optimizer, shuffler, **given), model, batches)
            if shuffler.moves_samples:  # to ranks with other outputs
                torch.testing.assert_close(got[1:], expected[1:], rtol=1e-4, atol=1e-6)
            else:
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


ACCUMULATION = "torchrec.distributed.train_pipeline.gradient_accumulation"


@pytest.mark.skipif(find_spec(ACCUMULATION) is None, reason="this version of TorchRec has none")
@on_ranks(2)
def test_torchrecs_gradient_accumulation_trains_as_on_its_own_pipeline():
    accumulation = importlib.import_module(ACCUMULATION)
    config = accumulation.GradientAccumulationConfig(is_enabled=True, num_steps=2)
    batches, results = loaded_histories(4), []
    for make in (partial(torchrecs, batches), partial(pipeline_of, "native", shuffler=TokenShuffler())):
        model, optimizer = sharded_ranking_model()
        pipeline = make(model=model, optimizer=optimizer)
        wrapped = accumulation.GradientAccumulationWrapper(pipeline, optimizer, model, config)
        results.append(learned_by(wrapped, model, batches)[1:])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["none", "native"])
@on_ranks(2)
def test_pipelines_run_in_a_thread_and_beside_another_default_device(name):
    def losses() -> list[float]:
        pipeline = ranking_pipeline(name, TokenShuffler())
        return [float(loss_sum) for loss_sum, _, _ in steps_of(pipeline, loaded_histories(3))]

    expected, found = losses(), []
    thread = threading.Thread(target=lambda: found.extend(losses()))
    thread.start()
    thread.join()
    assert found == expected
    pipeline, loaded = ranking_pipeline(name, TokenShuffler()), loaded_histories(3)
    torch.set_default_device("meta")
    try:
        assert [float(loss_sum) for loss_sum, _, _ in steps_of(pipeline, loaded)] == expected
    finally:
        torch.set_default_device(None)


@on_ranks(2)
def test_a_pipeline_of_another_kind_evaluates_once_the_first_is_detached():
    model, optimizer = sharded_ranking_model()
    training = pipeline_of("native", model, optimizer, TokenShuffler())
    evaluation = pipeline_of("none", model, optimizer, TokenShuffler())
    loader = iter(loaded_histories(6))
    training.progress(loader)
    with pytest.raises(RuntimeError, match="another pipeline has taken over a ShardedEmbedding"):
        evaluation.progress(iter(loaded_histories(2)))
    training.progress(loader)
    training.detach()
    model.eval()
    evaluation.progress(iter(loaded_histories(2)))
    assert evaluation.detach() is model
    for attached in ((), (model,)):
        evaluation.attach(*attached)
        evaluation.progress(iter(loaded_histories(2)))
    evaluation.reset()
    model.train()
    for attached in ((model,), ()):
        training.reset()
        training.detach()
        training.attach(*attached)
        training.progress(iter(loaded_histories(2)))


def total_of(outputs: Iterable[Any]) -> float:
    """Returns the sum of what a model computes for the samples of all ranks."""
    total = sum(output.values().double().sum() for output in outputs)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.skipif(
    Version(torchrec.__version__) < Version("1.6"),
    reason="until TorchRec 1.5, its own EvalPipelineSparseDist does not start again after its reset",
)
@on_ranks(2)
def test_evaluation_pipelines_between_steps_agree_and_do_not_disturb_training():
    losses, others = [], loaded_histories(2, seed=1)
    for evaluates in (False, True):
        model, optimizer = sharded_ranking_model(0.1)
        torchrecs_own = EvalPipelineSparseDist(model, optimizer, CPU)
        training, balanced = (pipeline_of("native", model, optimizer, TokenShuffler()) for _ in range(2))
        losses.append([])
        for loss_sum, *_ in steps_of(training, loaded_histories(4)):
            losses[-1].append(float(loss_sum))
            if evaluates:
                model.eval()
                with torch.no_grad():
                    expected, found = (outputs_of(pipeline, others) for pipeline in (torchrecs_own, balanced))
                assert [len(output.lengths()) for output in expected] == [4] * len(found)
                assert total_of(found) == pytest.approx(total_of(expected), rel=1e-5)
                torchrecs_own.reset()
                model.train()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
