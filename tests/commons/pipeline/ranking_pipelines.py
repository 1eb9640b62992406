"""Pipelines of a small ranking model with sharded tables."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import JaggedTensor

from commons.distributed import BatchShuffler
from commons.pipeline import TrainPipelineFactory
from tests.commons.histories import NUM_CLASSES, VOCABULARY, HistoryBatch, draw_histories

CPU = torch.device("cpu")
# TorchRec's pipelines, by the names that the factory has for them with the stage. Versions before 1.6 have no
# lite one.
OF_TORCHREC = {
    "native": "TrainPipelineSparseDist",
    "lite": "TrainPipelineSparseDistLite",
    "fused": "TrainPipelineFusedSparseDist",
    "semi_sync": "TrainPipelineSemiSync",
}
OTHERS = [name for name in ("lite", "fused", "semi_sync") if TrainPipelineFactory.is_registered(name)]
PIPELINES = ["none", "native", *OTHERS]
WIDTH, SCALE = 16, 0.05  # attention weights are divided by a constant, not by the length


class RankingModel(nn.Module):
    """Predicts the label of an item from its sample's tokens up to it; the same at each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingConfig(
                name=f"{key}_table", num_embeddings=VOCABULARY, embedding_dim=WIDTH, feature_names=[key]
            )
            for key in ("user", "item", "action")
        ]
        self.tables = EmbeddingCollection(tables)
        self.dense = RankingDense()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, batch: HistoryBatch) -> tuple[torch.Tensor, JaggedTensor]:
        """Returns the loss of each label, and the predictions of each sample."""
        return self.dense(self.tables(batch.features), batch)


class RankingDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(
        self, embeddings: Mapping[str, JaggedTensor], batch: HistoryBatch
    ) -> tuple[torch.Tensor, JaggedTensor]:
        counts = batch.row_counts_on_host()
        users, items = counts["features.user"], counts["features.item"]
        pairs = torch.stack([embeddings[key].values() for key in ("item", "action")], 1).flatten(0, 1)
        parts = zip(
            embeddings["user"].values().split(users.tolist()), pairs.split((2 * items).tolist()), strict=True
        )
        tokens = torch.cat([part for of_row in parts for part in of_row])
        lengths = (users + 2 * items).tolist()
        states = tokens + self.attend(*self.projection(tokens).chunk(3, 1), lengths, batch)
        of_rows = zip(states.split(lengths), items, users, counts["labels"], strict=True)
        labeled = [of_row[user + 2 * (item - last) :: 2] for of_row, item, user, last in of_rows]
        logits = self.head(torch.cat(labeled))
        losses = nn.functional.cross_entropy(logits, batch.labels.values(), reduction="none")
        return losses, JaggedTensor(logits.detach(), lengths=batch.labels.lengths())

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], batch: HistoryBatch
    ) -> torch.Tensor:
        """Lets each token see those of its row up to it."""
        of_rows = zip(*(part.split(lengths) for part in (q, k, v)), strict=True)
        return torch.cat([attended(*of_row) for of_row in of_rows])


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Attention of queries to keys of one sample; the first query is at place `first`."""
    return SCALE * (q @ k.T).sigmoid().tril(first) @ v


def sharded(
    model: nn.Module, learning_rate: float = 0.01, device: torch.device = CPU
) -> tuple[DistributedModelParallel, Any]:
    """Shards a model's tables by rows, and trains them by SGD in the backward; returns an optimizer, too."""
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": learning_rate}
    sharder = EmbeddingCollectionSharder(fused_params=params)
    tables = {path: part for path, part in model.named_modules() if isinstance(part, EmbeddingCollection)}
    plan = {
        path: construct_module_sharding_plan(
            collection,
            {table.name: row_wise(compute_kernel="fused") for table in collection.embedding_configs()},
            sharder=sharder,
            device_type=device.type,
        )
        for path, collection in tables.items()
    }
    made = DistributedModelParallel(model, device=device, plan=ShardingPlan(plan), sharders=[sharder])
    fused = made.fused_optimizer
    dense = [parameter for name, parameter in made.named_parameters() if name not in fused.params]
    return made, torch.optim.SGD(dense, learning_rate) if dense else fused


def sharded_ranking_model(learning_rate: float = 0.01) -> tuple[DistributedModelParallel, Any]:
    """Returns the model and its optimizer. Collective over all ranks."""
    return sharded(RankingModel(), learning_rate)


def pipeline_of(
    name: str, model: nn.Module, optimizer: Any, shuffler: BatchShuffler, reduction: str = "sum", **more: Any
) -> Any:
    if name == "semi_sync":
        more = {"start_batch": 1, **more}  # it trains synchronously before
    pipeline = TrainPipelineFactory.create(
        name,
        model=model,
        optimizer=optimizer,
        device=CPU.type,  # a name will do
        batch_shuffler=shuffler,
        loss_reduction=reduction,
        **more,
    )
    return on_cpus(pipeline)


def on_cpus(pipeline: Any) -> Any:
    """Lets TorchRec's fused and semi-synchronous pipelines run on CPUs, with the stage or without.

    They ask CUDA for its current stream, and record tensors for it, on any device. TorchRec 1.9 asks a stream
    for its device, which a CPU's has not.
    """
    tells = mock.patch.object(torch.cpu.Stream, "device", CPU, create=True)
    asks = mock.patch.object(torch.cuda, "current_stream", lambda device=None: None)
    records = mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)
    pipeline.progress = tells(asks(records(pipeline.progress)))
    return pipeline


def ranking_pipeline(name: str, shuffler: BatchShuffler) -> Any:
    return pipeline_of(name, *sharded_ranking_model(), shuffler)


def loaded_histories(count: int, seed: int = 0, rows: int = 4) -> list[HistoryBatch]:
    """Draws the batches that this rank loads."""
    rngs = [np.random.default_rng((seed, dist.get_rank(), number)) for number in range(count)]
    return [draw_histories(rng, rows) for rng in rngs]


def steps_of(pipeline: Any, batches: Iterable[Any]) -> Iterator[tuple[torch.Tensor, int, Any]]:
    """Yields loss sum, loss tokens and output of each step, until the loader has ended on all ranks."""
    loader = iter(batches)
    while True:
        try:
            output = pipeline.progress(loader)
        except StopIteration:
            return
        yield pipeline.loss_sum, pipeline.loss_tokens, output


def outputs_of(pipeline: Any, loader: Iterable[Any]) -> list[Any]:
    """Returns what a pipeline returns until its loader ends."""
    iterator, outputs = iter(loader), []
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs
