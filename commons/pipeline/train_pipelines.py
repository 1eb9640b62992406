"""TorchRec's train pipelines with the shuffle stage, and the factory that creates them by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline import train_pipelines as of_torchrec
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.types import ShardedModule

from ..distributed import BalanceReport, BatchShuffler, ShufflePlan
from ..distributed.exchange import Step, check_not_hidden
from ..distributed.ranks import is_lost
from ..named_ranges import named_range
from ..registry import NamedFactory
from .shuffle_stage import ShuffleStage, check_planned, note_on_static_graphs

# TorchRec's pipelines that the stage works with, and the number of batches that fill each.
_FILLED = {
    "TrainPipelineSparseDist": 2,
    "PrefetchTrainPipelineSparseDist": 2,
    "TrainPipelineSparseDistLite": 1,  # from TorchRec 1.6 on
    "TrainPipelineFusedSparseDist": 2,
    "TrainPipelineSemiSync": 3,
}


class _WithStage:
    """The properties that describe the last step, for all pipelines."""

    _stage: ShuffleStage
    _model: torch.nn.Module

    @property
    def loss_sum(self) -> torch.Tensor:
        """The sum of losses over this rank's loss tokens of the last step, a detached scalar on the device.

        To log the loss of a step, sum this over ranks with `dist.all_reduce`, and divide by `loss_tokens`.
        """
        return self._stage.last.loss_sum

    @property
    def loss_tokens(self) -> int | float:
        """Loss tokens of the last step over all ranks; a float if they are weights."""
        return self._stage.last.step.plan.whole.num_loss_tokens

    @property
    def report(self) -> BalanceReport:
        """The balance of the last step and the cost of balancing, computed on each access."""
        return self._stage.report()

    @property
    def num_samples(self) -> int:
        """Number of samples or pieces that this rank computed: the output's first rows, before padding."""
        return int(self.plan.num_placed[self._stage.rank])

    @property
    def plan(self) -> ShufflePlan:
        """The plan of the last step, for `unshuffle`. It covers the ranks that balance together, or all ranks
        if no rank's shuffler moves samples."""
        return self._stage.last.step.plan


class SequentialTrainPipeline(_WithStage, TrainPipeline):
    """Runs one step after another, and overlaps only the planning.

    For debugging, and for models without sharded tables.

    Args:
        model: model that takes a batch and returns `(losses, output)`.
        optimizer: optimizer of the parameters that get gradients in backward.
        device: device that batches are copied to, or its name.
        batch_shuffler: shuffler that places samples on ranks.
        loss_reduction: form in which the model returns its losses. "sum": their sum over this rank's loss
            tokens, or all losses in any shape. "mean": a scalar, their mean over this rank's (or the
            micro-batch's) loss tokens. "global_mean": a scalar whose mean over ranks is the mean over all
            ranks' loss tokens. The gradient is always that of the mean over all loss tokens of the step.

    Raises:
        TypeError: `batch_shuffler` is missing, or not a BatchShuffler.
        ValueError: `loss_reduction` is unknown, or is "global_mean" with micro-batches.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        batch_shuffler: BatchShuffler | None = None,
        loss_reduction: str | None = None,
    ) -> None:
        super().__init__()
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._stage = ShuffleStage(batch_shuffler, model, self._device, loss_reduction)
        self._step: Step | None = None  # exchanged but not computed; kept for a retry if computing raises
        self._lookups = [module for module in model.modules() if isinstance(module, ShardedModule)]

    def reset(self) -> None:
        """Drops the batches in flight."""
        self._step = None
        self._stage.reset()

    def detach(self) -> torch.nn.Module:
        """Returns the model, which this pipeline never modifies. Batches in flight are kept."""
        return self._model

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Takes the model back after `detach`, as TorchRec's pipelines do. `model` is this pipeline's."""

    @note_on_static_graphs()
    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Runs one step and returns the model's output. The step trains if the model is in training mode.

        Raises:
            StopIteration: the loaders of all ranks have ended. Every rank raises it in the same call.
            RuntimeError: another pipeline has taken over the model's lookups for its own steps.
        """
        if self._step is None:
            for module in self._lookups:
                if not inspect.ismethod(module.forward):
                    raise RuntimeError(
                        f"another pipeline has taken over a {type(module).__name__} of the model: evaluate "
                        "with a pipeline of the same kind, or call the other one's detach() before"
                    )
            step = self._stage.next_batch(dataloader_iter)
            if step is None:
                self._stage.end_epoch()
                raise StopIteration
            with named_range("## copy_batch_to_gpu ##"):  # TorchRec's name for it, on any device
                step = step.to(self._device, non_blocking=True)
            self._step = self._stage.exchange(step)
        if self._model.training:
            with named_range("## zero_grad ##"):
                self._optimizer.zero_grad()
        with named_range("## forward ##"):
            loss, output = self._stage.forward(self._step)
        self._stage.let_go(self._step)
        self._step = None
        if self._model.training:
            with named_range("## backward ##"):
                loss.backward()
            if isinstance(self._model, DMPCollection):
                self._model.sync()  # as in TorchRec's pipelines; otherwise, tables' replicas diverge
            with named_range("## optimizer ##"):
                self._optimizer.step()
        return output


class ShuffleStageMixin(_WithStage):
    """Adds the stage to a subclass of TorchRec's `TrainPipelineSparseDist`, which is the next base class.

    `class Balanced(ShuffleStageMixin, TheirPipeline): pass` adds balancing to `TheirPipeline`. That class may
    override `_backward`, `_next_batch`, and `_optimizer_step` of TorchRec's sparse-dist pipeline, or of its
    prefetching, lite, fused, or semi-synchronous one. `_next_batch` runs one step earlier than without the
    stage, in the same call on all ranks. If it communicates, it must return None on all ranks in the same
    call. The constructor has the arguments and errors of `SparseDistTrainPipeline`. It takes arguments of
    `TheirPipeline` by name.

    Raises:
        TypeError: the base class is another pipeline, or precedes the mixin.
    """

    _filled: int

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        mro = cls.__mro__
        pipelines = [base for base in mro if issubclass(base, TrainPipeline)]
        theirs = [base for base in pipelines if not issubclass(base, ShuffleStageMixin)]
        known = [base.__name__ for base in theirs if base.__module__.startswith("torchrec.")]
        is_behind = bool(theirs) and mro.index(theirs[0]) < mro.index(ShuffleStageMixin)
        if is_behind or (known and known[0] not in _FILLED):
            raise TypeError(
                f"write class {cls.__name__}(ShuffleStageMixin, Base): Base is, or directly extends, "
                f"{' or '.join(_FILLED)}, and not {theirs[0].__name__}"
            )
        cls._filled = _FILLED[known[0]] if known else 0

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        batch_shuffler: BatchShuffler | None = None,
        loss_reduction: str | None = None,
        **torchrec_arguments: Any,
    ) -> None:
        for argument in ("enable_inplace_copy_batch", "inplace_copy_batch_to_gpu"):  # the latter until 1.5
            if torchrec_arguments.get(argument):
                raise ValueError(f"copies of {argument} would bypass the exchange: leave it out")
        if torchrec_arguments.get("emb_lookup_stream", "data_dist") != "data_dist":
            raise ValueError("no other emb_lookup_stream than that of data_dist is ordered: leave it out")
        device = torch.device(device)
        self._stage = ShuffleStage(batch_shuffler, model, device, loss_reduction)
        super().__init__(  # type: ignore[call-arg]
            model, optimizer, device, custom_model_fwd=self._stage.forward, **torchrec_arguments
        )
        for argument in ("free_features_storage_early", "clear_data_dist_inputs"):
            for name in self._stage.names("runs_in_parts") if torchrec_arguments.get(argument) else ():
                raise ValueError(f"{argument} frees fields that {name} divides later: leave one of them out")
        loads_between = self._filled == 3 or torchrec_arguments.get("enqueue_batch_after_forward")
        for name in self._stage.names("times_steps") if loads_between else ():
            raise ValueError(
                f"{type(self).__name__} waits for other ranks' next batches while {name} times a step: use "
                '"native", without enqueue_batch_after_forward'
            )
        self._loader: _Loader | None = None
        if device.type == "cuda":
            # A second pipeline on a model, such as for evaluation, takes over its lookups and the stream they
            # wait on. With its own streams, it would read the first pipeline's batches unsynchronized.
            self._memcpy_stream = _stream(device, "memcpy")
            if self._filled > 1:  # TrainPipelineSparseDistLite has no other
                self._data_dist_stream = self._emb_lookup_stream = _stream(device, "dist")

    def reset(self) -> None:
        """Drops the batches in flight."""
        super().reset()  # type: ignore[misc]
        self._stage.reset()

    @note_on_static_graphs()
    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Runs one step as TorchRec's pipeline does.

        After a StopIteration, the next call starts a new epoch, even with the same iterator object. An error
        in loading or planning is raised by the call after the current step, and the next one goes on.
        """
        try:
            return super().progress(dataloader_iter)  # type: ignore[misc]
        except StopIteration:
            if not self._stage.postponed:
                self._dataloader_exhausted = False  # read by a `_next_batch` like TorchRec's
                self._stage.end_epoch()
                raise
        raise self._stage.postponed.pop(0)

    def fill_pipeline(self: Any, dataloader_iter: Iterator[Any]) -> None:
        """Fills the pipeline as TorchRec does, and resumes if a loader's error interrupted it.

        TorchRec takes fewer waiting batches for the last ones, and would never start the lookups of others.
        """
        starts = self._filled == 3 or isinstance(self, PrefetchTrainPipelineSparseDist)
        while 0 < len(self.batches) < self._filled and self.enqueue_batch(dataloader_iter):
            if starts and len(self.batches) == 2:  # others do so in `progress`
                self.start_sparse_data_dist(self.batches[1], self.contexts[1])
                self.wait_sparse_data_dist(self.contexts[1])
        super().fill_pipeline(dataloader_iter)  # type: ignore[misc]
        if self._stage.postponed:
            raise StopIteration
        if self.batches:  # another pipeline on the model, such as for evaluation, may have set its own
            self._set_module_context(self.contexts[0])

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any | None, Any]:
        """Returns the next planned batch on the device, exchanged right after its copy on the same stream."""
        try:
            batch, context = super().copy_batch_to_gpu(dataloader_iter)  # type: ignore[misc]
        except StopIteration:  # without execute_all_batches, even within a step
            if not self._stage.postponed:
                raise
            return None, None
        if batch is not None:
            with self._stream_context(self._memcpy_stream):  # type: ignore[attr-defined]
                batch = self._stage.exchange(batch)
                for event in context.events:  # TrainPipelineSemiSync waits for it, not for the stream
                    event.record()
        return batch, context

    def dequeue_batch(self) -> None:
        """Drops the batch that has run. Raises a TypeError if it bypassed the stage."""
        self._stage.let_go(self.batches[0])  # type: ignore[attr-defined]
        super().dequeue_batch()  # type: ignore[misc]

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any | None:
        theirs, loader = super()._next_batch, dataloader_iter  # type: ignore[misc]
        # TorchRec's method takes a batch of None for the end. The stage reads batches itself, and raises.
        if theirs.__func__ is not TrainPipelineSparseDist._next_batch:
            if self._loader is None or dataloader_iter is not self._loader.batches:
                self._loader = _Loader(dataloader_iter, theirs)
            loader = self._loader
        try:
            return self._stage.next_batch(loader)
        except Exception as error:  # the current step may be half done, and no rank but a lost one waits
            if is_lost(error):
                raise
            self._stage.postponed.append(error)
            return None

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        check_planned(self.batches[0])  # type: ignore[attr-defined]
        check_not_hidden(self.batches[0].batch)  # type: ignore[attr-defined]
        # Without a sharded module, TorchRec would trace into all others and fail at a branch on data.
        if any(isinstance(module, ShardedModule) for module in self._model.modules()):
            super()._pipeline_model(*args, **kwargs)  # type: ignore[misc]
        for name in self._stage.names("runs_in_parts") if self._pipelined_postprocs else ():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"pipeline_postproc runs modules on the whole batch before {name} divides it, so each part "
                "would get whole results: leave one of them out, or have the loader do their work"
            )
        if not self._pipelined_modules:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{type(self).__name__} found no module of the model to pipeline: the top-level forward must "
                "call a sharded embedding module on an attribute of the batch, as in "
                'self.embeddings(batch.features). Otherwise use pipeline "none"'
            )


class _Loader(Iterator[Any]):
    """Reads a loader through the `_next_batch` of a pipeline, which returns None after the end."""

    def __init__(self, batches: Iterator[Any], next_batch: Callable[[Iterator[Any]], Any | None]) -> None:
        self.batches, self._next_batch = batches, next_batch

    def __next__(self) -> Any:
        batch = self._next_batch(self.batches)
        if batch is None:
            raise StopIteration
        return batch


class SparseDistTrainPipeline(ShuffleStageMixin, TrainPipelineSparseDist):
    """TorchRec's `TrainPipelineSparseDist` with the shuffle stage.

    The copy and exchange run on one stream, and the embeddings' input distribution on another, while earlier
    steps compute. The arguments are those of `SequentialTrainPipeline` and of TorchRec's pipeline. `progress`
    returns the model's output. Provisional: may change in a minor version.

    Raises:
        ValueError: `loss_reduction` is invalid as in `SequentialTrainPipeline`; or an argument of TorchRec's
            pipeline would bypass the stage, or does not work with an extension.
        RuntimeError: the model has no sharded module that TorchRec can pipeline. The first step raises it.
    """


class PrefetchTrainPipeline(ShuffleStageMixin, PrefetchTrainPipelineSparseDist):
    """TorchRec's `PrefetchTrainPipelineSparseDist` with the shuffle stage.

    Rows of tables in host memory are fetched into the GPU's cache one step ahead, on a separate stream. The
    arguments and the result of `progress` are those of `SparseDistTrainPipeline`.

    Raises:
        ValueError: the device is not a GPU, or no table of the model has the cached kernel.
        RuntimeError: the model has no sharded module that TorchRec can pipeline. The first step raises it.
    """

    def __init__(self, *arguments: Any, **named_arguments: Any) -> None:
        super().__init__(*arguments, **named_arguments)
        device, cached = self._device, EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        plans = [getattr(module, "module_sharding_plan", {}).values() for module in self._model.modules()]
        if device.type != "cuda" or not any(of.compute_kernel == cached for plan in plans for of in plan):
            raise ValueError(
                f'pipeline "prefetch" needs a GPU, and a table planned with the compute kernel "{cached}" '
                'and prefetch_pipeline=True among its fused parameters: use "native" otherwise'
            )
        self._prefetch_stream = _stream(device, "prefetch")


class TrainPipelineFactory(NamedFactory[TrainPipeline]):
    """Registers train pipelines and creates them by name.

    Use `create(name, model=, optimizer=, device=, batch_shuffler=, loss_reduction=)`. The name is "none"
    (overlaps only planning), "native" (TorchRec's sparse-dist pipeline), "prefetch" (the same with cached
    tables; CUDA only), or one of TorchRec's others: "lite" (from TorchRec 1.6 on), "fused", or "semi_sync".
    """

    kind = "train pipeline"
    base = TrainPipeline


TrainPipelineFactory.register("none", SequentialTrainPipeline)
TrainPipelineFactory.register("native", SparseDistTrainPipeline)
TrainPipelineFactory.register("prefetch", PrefetchTrainPipeline)
for _name, _of in zip(("lite", "fused", "semi_sync"), [*_FILLED][2:], strict=True):
    if hasattr(of_torchrec, _of):
        _bases = (ShuffleStageMixin, getattr(of_torchrec, _of))
        TrainPipelineFactory.register(_name, type(f"Balanced{_of}", _bases, {}))


def _stream(device: torch.device, use: str) -> torch.Stream:
    """Returns the stream for one use, shared by all pipelines on a device."""
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index, use)


@functools.cache
def _stream_of(index: int, use: str) -> torch.Stream:
    return torch.cuda.Stream(index, priority=0 if use == "prefetch" else -1)
