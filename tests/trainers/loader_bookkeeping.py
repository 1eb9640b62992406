"""A batch with its loader's bookkeeping, which the loop reads after each step, as TorchEasyRec's.

"# balancing" marks the statements that switch the stage on, "# before:" the code they replace."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
import workload_balancer.extensions.more_kinds  # noqa: F401  # balancing
from torch.utils.data import DataLoader
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

# before: from torchrec.distributed import TrainPipelineSparseDist
from workload_balancer.distributed import BatchShuffler  # balancing
from workload_balancer.pipeline import SparseDistTrainPipeline  # balancing

from tests.trainers.clicks import Row, Scorer, draw, jagged, make_tables, mean_loss, shard  # noqa: F401

GROUP, PLAIN = "__BASE__", ("reserves", "dummy", "checkpoint_info")


class Reserves:
    """Columns kept for predictions; no container that could be exchanged."""


@dataclass
class LoadedBatch(Pipelineable):
    dense_features: dict[str, KeyedTensor] = field(default_factory=dict)
    sparse_features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    sequence_dense_features: dict[str, JaggedTensor] = field(default_factory=dict)
    labels: dict[str, torch.Tensor] = field(default_factory=dict)
    reserves: Reserves = field(default_factory=Reserves)
    sample_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    additional_infos: dict[str, torch.Tensor] = field(default_factory=dict)
    dummy: bool = False
    checkpoint_info: dict[str, int] | None = None

    def _with(self, change: Any) -> Self:
        dicts = {name: of for name, of in vars(self).items() if name not in PLAIN}
        changed = {name: {key: change(part) for key, part in of.items()} for name, of in dicts.items()}
        return dataclasses.replace(self, **changed)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return self._with(lambda part: part.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self._with(lambda part: part.record_stream(stream))


def collate(rows: list[Row]) -> LoadedBatch:
    viewed, shown, clicked = map(list, zip(*rows, strict=True))
    return LoadedBatch(
        {GROUP: KeyedTensor(["age"], [1], torch.tensor([[len(ids) / 100] for ids in viewed]))},
        {GROUP: jagged(viewed=viewed, shown=shown)},
        {"price": JaggedTensor.from_dense([ids / 200 for ids in viewed])},
        {"clicked": torch.tensor(clicked)},
        sample_weights={"clicked": torch.ones(len(rows))},
        additional_infos={"shown": torch.cat(shown)},
        checkpoint_info={f"part-{int(shown[0]) % 3}": int(shown[-1])},  # other keys on each rank
    )


class LoadedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.scorer = make_tables(), Scorer()

    def forward(self, batch: LoadedBatch) -> tuple[torch.Tensor, Any]:
        scores = self.scorer(self.tables(batch.sparse_features[GROUP]))
        loss = mean_loss(scores, batch.labels["clicked"], weight=batch.sample_weights["clicked"])
        return loss, (loss.detach(), {"logits": scores.detach()}, batch)


class LoadedShuffler(BatchShuffler):  # balancing
    shared_fields = ("reserves",)

    def get_workloads(self, batch: LoadedBatch) -> torch.Tensor:
        return batch.sparse_features[GROUP]["viewed"].lengths() ** 2


def train(data: list[Row], device: torch.device) -> tuple[torch.Tensor, torch.nn.Module]:
    model, optimizer = shard(LoadedModel(), device)
    # before: pipeline = TrainPipelineSparseDist(model, optimizer, device)
    pipeline = SparseDistTrainPipeline(model, optimizer, device, LoadedShuffler(), "mean")  # balancing
    batches, losses = iter(DataLoader(data, batch_size=8, collate_fn=collate)), []
    model.positions = []  # for checkpoints
    while True:
        try:
            loss, _, batch = pipeline.progress(batches)
        except StopIteration:
            break
        model.positions.append(batch.checkpoint_info)
        rows = torch.tensor(len(batch.labels["clicked"]))
        losses.append(torch.stack([loss * rows, rows]))
    sums = torch.stack(losses)
    dist.all_reduce(sums)
    return sums[:, 0] / sums[:, 1], model
