"""Table of unbounded ids on gloo ranks, to look up and train step by step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.training import OptimizerArgs, shard_model
from commons.unbounded_ids import ShardedUnboundedEmbeddingCollection, UnboundedEmbeddingCollection
from tests.commons.training.internals import TrainingState
from tests.commons.unbounded_ids.internals import mixed, owners

WIDTH = 4


class Summed(nn.Module):
    def __init__(self, num_rows: int, eviction: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        table = EmbeddingConfig(
            name="item_table", embedding_dim=WIDTH, num_embeddings=num_rows, feature_names=["item"]
        )
        self.embeddings = UnboundedEmbeddingCollection([table], {"item_table": eviction}, None)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.embeddings(features)["item"].values()
        return ((found + 1) ** 2 @ self.weight).sum(), found


class Table:
    def __init__(self, num_rows: int, eviction: str, optimizer: str = "adagrad") -> None:
        model, optimizers = shard_model(
            Summed(num_rows, eviction), OptimizerArgs(optimizer, 0.1), torch.device("cpu")
        )
        self.state = TrainingState(model, optimizers)
        (self.collection,) = (
            module for module in model.modules() if isinstance(module, ShardedUnboundedEmbeddingCollection)
        )

    def step(self, *ids_of_rank: Sequence[int]) -> None:
        """Trains the table alone for one step."""
        self.state.model.train()
        loss, _ = self.state.model(_features(ids_of_rank[dist.get_rank()]))
        (loss * dist.get_world_size()).backward()  # TorchRec divides gradients by the number of ranks
        for parameter in self.state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.state.optimizer.step()

    @torch.no_grad()
    def look_up(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns embeddings in evaluation mode."""
        self.state.model.eval()
        return self.state.model(_features(ids))[1]

    def held(self) -> list[int]:
        """Returns the ids with a row on this rank, in ascending order."""
        return sorted(self.collection.held_ids("item_table")[0].tolist())

    def contents(self) -> list[torch.Tensor]:
        """Returns copies of this rank's model state, and of the table's optimizer state."""
        model_state = [
            value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
            for value in self.state.model.state_dict().values()
        ]
        return [value.clone() for value in [*model_state, *self.collection._states("item_table")]]


def owned_by(rank: int, num_ranks: int, number: int, start: int = 0) -> list[int]:
    """Returns the first ids from `start` whose rows a rank owns."""
    ids = torch.arange(start, start + 40 * number * num_ranks)
    return ids[owners(mixed(ids), num_ranks) == rank][:number].tolist()


def _features(ids: Sequence[int]) -> KeyedJaggedTensor:
    """Returns a row of ids and an empty row."""
    lengths = torch.tensor([len(ids), 0], dtype=torch.int32)
    return KeyedJaggedTensor(["item"], torch.tensor(ids, dtype=torch.int64), lengths=lengths)
