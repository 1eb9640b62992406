"""TorchRec's train pipelines with the shuffle stage in them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.types import ShardedModule

from commons.distributed import BalanceReport, BatchShuffler
from commons.pipeline.shuffle_stage import ShuffleStage, StepOutput
from commons.sequence_batch import BaseBatch


class SequentialTrainPipeline(TrainPipeline):
    """One step after the other, nothing overlapped: for debugging, and for models without sharded tables.

    Args:
        model: batch to `(losses of any shape, output)`; losses are summed over loss tokens, not averaged.
        optimizer: of the parameters that backward leaves gradients on.
        device: where batches are copied to.
        batch_shuffler: what places samples on ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        batch_shuffler: BatchShuffler,
    ) -> None:
        super().__init__()
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._stage = ShuffleStage(batch_shuffler)
        self._ended: Iterator[BaseBatch] | None = None

    @property
    def report(self) -> BalanceReport:
        """Balance of the step that ran last."""
        return self._stage.report

    def reset(self) -> None:
        """Drops what is on its way."""
        self._stage.reset()
        self._ended = None

    def progress(self, dataloader_iter: Iterator[BaseBatch]) -> StepOutput:
        """Runs one step; trains if the model is in training mode.

        Returns:
            The loss sum of this rank, the loss tokens of all ranks, and the model's output.

        Raises:
            StopIteration: the loaders of all ranks have ended; on every rank in the same call.
        """
        batch = self._stage.plan(self._next_batch(dataloader_iter))
        if batch is None:
            raise StopIteration
        batch = self._stage.exchange(batch.to(self._device, non_blocking=True))
        if self._model.training:
            self._optimizer.zero_grad()
        loss, output = self._stage.forward(self._model, batch)
        if self._model.training:
            loss.backward()
            self._optimizer.step()
        return output

    def _next_batch(self, dataloader_iter: Iterator[BaseBatch]) -> BaseBatch | None:
        if dataloader_iter is self._ended:  # asking a loader again that has ended can hang
            return None
        batch = next(dataloader_iter, None)
        self._ended = dataloader_iter if batch is None else None
        return batch


class SparseDistTrainPipeline(TrainPipelineSparseDist):
    """TorchRec's `TrainPipelineSparseDist`: copy and exchange, and the embeddings' input distribution, run on
    streams of their own beside the previous steps' compute.

    Takes the same arguments as `SequentialTrainPipeline`, and `progress` is the same.

    Raises:
        RuntimeError: at the first step, if the model has no sharded module that TorchRec can pipeline.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        batch_shuffler: BatchShuffler,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd=self._forward)
        self._stage = ShuffleStage(batch_shuffler)
        if device.type == "cuda":
            # A second pipeline on a model, for evaluation, takes over its lookups, and with them the stream
            # they wait on: with streams of its own, the first one's batches would be read unsynchronised.
            self._memcpy_stream, self._data_dist_stream = _streams(device)

    @property
    def report(self) -> BalanceReport:
        """Balance of the step that ran last."""
        return self._stage.report

    def reset(self) -> None:
        """Drops the batches on their way."""
        super().reset()
        self._stage.reset()

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[BaseBatch]) -> tuple[BaseBatch | None, Any]:
        """The next batch on the device, planned before the copy and exchanged behind it on its stream."""
        batch, context = super().copy_batch_to_gpu(dataloader_iter)
        if batch is not None:
            with self._stream_context(self._memcpy_stream):
                batch = self._stage.exchange(batch)
        return batch, context

    def _next_batch(self, dataloader_iter: Iterator[BaseBatch]) -> BaseBatch | None:
        return self._stage.plan(super()._next_batch(dataloader_iter))

    def _forward(self, batch: BaseBatch) -> tuple[torch.Tensor, StepOutput]:
        return self._stage.forward(self._model, batch)

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        # Without a sharded module TorchRec would trace into all others, and fail at a branch on data.
        if any(isinstance(module, ShardedModule) for module in self._model.modules()):
            super()._pipeline_model(*args, **kwargs)
        if not self._pipelined_modules:
            raise RuntimeError(
                'pipeline "native" found no module of the model to pipeline. TorchRec needs a sharded '
                "embedding module (a model-parallel table under DistributedModelParallel) that the top-level "
                "forward calls on an attribute of the batch, as in self.embeddings(batch.features); "
                'a KeyedJaggedTensor built in the forward hides it. Otherwise use pipeline "none"'
            )


@functools.cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """The copy and input-distribution streams of all pipelines on a device."""
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
