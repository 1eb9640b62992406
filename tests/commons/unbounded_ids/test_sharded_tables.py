from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.training.internals import Checkpoints
from tests.commons.unbounded_ids.internals import fresh_rows, mixed, owners
from tests.commons.unbounded_ids.sharded_tables import WIDTH, Table, owned_by
from tests.on_ranks import on_ranks

A, B, C, D, E = owned_by(0, 2, 5, start=10**15)


@pytest.mark.parametrize("from_rank", [0, 1])
@pytest.mark.parametrize(
    ("eviction", "steps", "held"),
    [
        ("lru", [[A], [B], [C], [A], [D]], [A, C, D]),
        ("lru", [[C, A, B, A], [A], [B, A], [D], [E, E]], [D, E]),
        ("lru", [[A, A, A, B, B], [C], [D, E]], [C, D, E]),
        ("lfu", [[A, A, B, B, C], [D]], [A, B, D]),
        ("lfu", [[A, A, B, B, C], [D], [E], [C]], [A, B, C]),
        ("lfu", [[A], [A], [B], [C], [C], [D], [E, B]], [B, E]),
    ],
)
@on_ranks(2)
def test_new_ids_evict_those_used_least_recently_or_frequently(eviction, steps, held, from_rank):
    table = Table(8, eviction)  # rank 0 has three rows for ids, and owns all of these
    for ids in steps:
        table.step(*([ids, []] if from_rank == 0 else [[], ids]))
    if dist.get_rank() == 0:
        assert set(held) <= set(table.held()) and len(table.held()) == 3
    else:
        assert table.held() == []


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
@on_ranks(2)
def test_recycled_row_is_that_of_a_fresh_id(optimizer):
    found = []
    for others in ([A, B, C], []):
        table = Table(8, "lru", optimizer)
        for _ in range(3):
            table.step(others, others)
        table.step([D], [])
        found.append(table.look_up([D]))
    salt = table.collection._salts["item_table"]
    recycled, unused, fresh = *found, fresh_rows(mixed(torch.tensor([D])), WIDTH, 8**-0.5, salt)
    assert torch.equal(recycled, unused)
    assert not torch.equal(unused, fresh)  # one step has changed it
    assert (unused - fresh).abs().max() < 1


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@on_ranks(2)
def test_evaluation_changes_nothing(eviction):
    table = Table(8, eviction)
    table.step([A, B], [B])
    before = table.contents()
    found = table.look_up([C, D, E, A])
    after = table.contents()
    assert len(before) == len(after) > 4
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[3])


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@on_ranks(2)
def test_every_id_gets_a_row_in_the_step_it_first_occurs_in(eviction):
    table, rank = Table(400, eviction), dist.get_rank()
    (of_rank_1,) = owned_by(1, 2, 1)
    for ids in ([of_rank_1], list(range(20)), list(range(150))):
        table.step(ids, ids[:1])
        own = [id_ for id_ in ids if owners(mixed(torch.tensor([id_])), 2).item() == rank]
        assert table.held() == sorted({*own, of_rank_1} if rank else own)
        assert len(ids) == 1 or abs(len(own) - len(ids) / 2) < 0.2 * len(ids)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@on_ranks(2)
def test_ids_of_a_step_beyond_the_rows_share_one(eviction):
    table = Table(8, eviction)
    with warnings_of("commons.unbounded_ids") as messages:
        for _ in range(2):
            table.step([A, B, C, D, E, E, D], [C])
        found = table.look_up([A, B, C, D, E])
    assert torch.equal(found[0], found[1])
    assert len({tuple(row) for row in found.tolist()}) == 4
    if dist.get_rank():
        assert messages == []
    else:
        assert table.held() == sorted([C, D, E])  # the most frequent
        (message,) = messages
        assert "one step has 5 ids for the 3 rows of ids on one rank" in message


IDS = [*range(0, 64 * 20, 64), -5, 2**63 - 1, -(2**63) + 1]


def _saved(path: str, eviction: str, optimizer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Saves or restores, and returns the embeddings before and after one more step."""
    table = Table(89, eviction, optimizer)
    checkpoints = Checkpoints(Path(path))
    newest, _ = checkpoints.newest()
    if newest is None:
        for step in range(3):
            table.step(IDS[: 15 + 4 * step], *[IDS[step:9]] * 2)
        checkpoints.save(1, table.state.to_save(), table.state.settings_to_save())
        checkpoints.finish()
    else:
        table.state.restore(checkpoints, newest)
        assert (owners(mixed(torch.tensor(table.held())), dist.get_world_size()) == dist.get_rank()).all()
    before = table.look_up(IDS)
    table.step(IDS[1:9], [], [])
    return before, table.look_up(IDS)


@pytest.mark.parametrize(
    ("eviction", "optimizer", "num_ranks"),
    [("lru", "adagrad", (2, 3)), ("lfu", "adam", (3, 2)), ("lru", "sgd", (3, 3))],
)
def test_ids_move_with_their_states_to_the_ranks_that_own_them(
    pools, tmp_path, eviction, optimizer, num_ranks
):
    saved, restored = (
        pools(number).run(_saved, str(tmp_path), eviction, optimizer)[0] for number in num_ranks
    )
    assert len({tuple(row) for row in saved[0].tolist()}) == len(IDS)
    assert torch.equal(saved[0], restored[0])
    assert not torch.allclose(saved[0][1:9], saved[1][1:9])
    # Another step shows the optimizer's state, which moves with the ids.
    torch.testing.assert_close(saved[1], restored[1], rtol=1e-5, atol=0)


def _left_where_they_were(path: str) -> None:
    table = Table(90, "lru")
    checkpoints = Checkpoints(Path(path))
    newest, _ = checkpoints.newest()
    if newest is None:
        checkpoints.save(1, table.state.to_save())
        checkpoints.finish()
        return
    state = {"model": table.state.to_save()["model"]}
    checkpoints.load(newest, state)
    table.state.model.load_state_dict(state["model"])
    with pytest.raises(RuntimeError, match="checkpoint of other ranks: call place_loaded_ids"):
        table.look_up([1])


def test_ids_that_were_not_moved_are_not_looked_up(pools, tmp_path):
    for num_ranks in (2, 3):
        pools(num_ranks).run(_left_where_they_were, str(tmp_path))


@on_ranks(3)
def test_every_rank_needs_rows():
    for num_rows in (1, 7):
        with pytest.raises(ValueError, match=f"'item_table' has {num_rows} rows for 3 ranks.*expected"):
            Table(num_rows, "lru")
    with pytest.raises(ValueError, match="eviction = 'fifo', expected one of lru, lfu"):
        Table(90, "fifo")
