"""Interfaces that other trainers rely on; `tests/examples` checks that the same programs learn the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.docs.pages import blocks
from tests.examples.programs import BATCH_SIZE, load, rows_of, trained_alone
from tests.on_ranks import on_ranks

CPU = torch.device("cpu")


@on_ranks(2)
def test_a_batch_keeps_the_bookkeeping_of_its_own_ranks_loader():
    module, rank = load("loader_bookkeeping"), dist.get_rank()
    data = rows_of("loader_bookkeeping", [BATCH_SIZE, 1], 3)[rank]
    _, model = module.train(data, CPU)
    loaded = [batch.checkpoint_info for batch in DataLoader(data, BATCH_SIZE, collate_fn=module.collate)]
    assert model.positions == loaded


@pytest.mark.parametrize("drops", [True, False])
@on_ranks(2)
def test_a_subclass_decides_when_data_ends(drops):
    module, data = load("derived_pipeline"), rows_of("derived_pipeline", [5, 0], 4)
    module.DROPS_REMAINDER = drops
    losses, _ = module.train(data[dist.get_rank()], CPU)
    expected, _ = trained_alone("derived_pipeline", data)
    assert losses.tolist() == pytest.approx(expected[: 3 if drops else 4], rel=1e-5)


class Positions:
    """A loader whose state is the position of the batch that it loaded last."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        for self.position in range(5):
            yield self._batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}


@on_ranks(2)
def test_the_states_of_a_loader_are_those_of_the_trained_steps():
    [block] = (block for block in blocks("python") if "def with_states" in block.code)
    exec(block.code, page := {})
    module, [data, _] = load("stream_loop"), rows_of("stream_loop", [8, 8], 1)
    planned = module.SamplesShuffler().plan_ahead(page["with_states"](Positions(module.collate(data))))
    trained = [page["states"].popleft()["position"] for _ in planned]
    assert trained == list(range(5)) and not page["states"]
