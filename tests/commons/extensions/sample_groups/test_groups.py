"""Groups of samples that a shuffler keeps on one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.extensions.sample_groups import SampleGroups
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.compiled_kernels import before_and_after_placing
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of, warnings_of
from tests.commons.histories import TokenShuffler
from tests.on_ranks import on_ranks

PER_USER, ROWS = 4, 32


class UserShuffler(TokenShuffler):
    """Samples of one user belong together, users 0 and 1 excepted."""

    def get_groups(self, batch):
        user = batch.features["user"].values()
        return torch.where(user < 2, -1, user)


def grouping(**settings) -> TokenShuffler:
    return TokenShuffler(extensions=[SampleGroups("user")], **settings)


def _batch(users: list[int], items: list[int]) -> BaseBatch:
    """Makes a batch of samples with one user and some items each; user −1 is none."""
    lengths = torch.tensor([*(int(user >= 0) for user in users), *items])
    values = torch.tensor([*(user for user in users if user >= 0), *range(sum(items))])
    return BaseBatch(KeyedJaggedTensor(["user", "item"], values, lengths=lengths), len(users), {})


def _user_major(rng: np.random.Generator, first_user: int) -> BaseBatch:
    users = np.repeat(np.arange(ROWS // PER_USER), PER_USER)
    items = rng.integers(20, 201, ROWS // PER_USER)[users]
    return _batch((first_user + users).tolist(), items.tolist())


def _ranks_of_users(shuffler) -> list[tuple[int, int]]:
    """(users, pairs of a user and a rank that has some of its samples) of some steps."""
    rng, counts = np.random.default_rng(dist.get_rank()), []
    for _ in range(4):
        placed = shuffler.shuffle(_user_major(rng, 10 * dist.get_rank()))
        mine = sorted(set(placed.features["user"].values().tolist()))
        everywhere: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
        counts.append((len(set().union(*everywhere)), sum(map(len, everywhere))))
    return counts


@on_ranks(3)
def test_users_stay_on_one_rank():
    together = grouping(tolerance=0.03)
    together, alone = [_ranks_of_users(together), _ranks_of_users(TokenShuffler(partitioner="refined"))]
    assert all(pairs <= users + 1 for users, pairs in together)
    assert all(pairs >= 1.5 * users for users, pairs in alone)


def _placed_users(shuffler, users: list[int]) -> list[int]:
    placed = shuffler.shuffle(_batch(users, [3] * len(users)))
    return placed.features["user"].values().tolist()


def _scattered() -> tuple[list[int], list[int], list[int]]:
    users = [5, 6, 7, 8] if dist.get_rank() else [5, 6, 7, 8][::-1]
    return (
        _placed_users(grouping(), users),
        _placed_users(UserShuffler(extensions=[SampleGroups()]), [0, 1, 5, 5]),
        _placed_users(grouping(), [-1, -1, -1, -1]),
    )


def test_samples_of_a_group_come_together_and_others_stay(pools):
    (first, few, none), (second, few_there, none_there) = pools(2).run(_scattered)
    assert not set(first) & set(second)
    assert sorted(few + few_there) == [0, 0, 1, 1, 5, 5, 5, 5] and (5 in few) != (5 in few_there)
    assert none == none_there == []


@on_ranks(2)
def test_groups_take_no_collective_more():
    names = []
    for shuffler in (TokenShuffler(), grouping()):
        shuffler.plan(_batch([1, 2], [3, 4]))
        with recorded_collectives() as calls:
            shuffler.plan(_batch([1, 2], [3, 4]))
        names.append([name for name, _ in calls])
    without, with_groups = names
    assert without == with_groups


class _Wrong(TokenShuffler):
    def __init__(self, groups):
        super().__init__(extensions=[SampleGroups()])
        self.groups = groups

    def get_groups(self, batch):
        return self.groups


def test_hashes_name_groups_whatever_their_sign():
    shuffler = grouping()
    hashes = [-5, 7, -(2**63), -5]
    keyed = KeyedJaggedTensor(["user"], torch.tensor(hashes), lengths=torch.ones(4, dtype=torch.int64))
    groups = shuffler.extensions[0].columns(BaseBatch(keyed, 4, {}))["groups"]
    assert (groups >= 0).all()
    assert [[bool(one == other) for other in groups] for one in groups] == [
        [one == other for other in hashes] for one in hashes
    ]


@on_ranks(2)
def test_errors():
    batch = _batch([1, 2], [3, 4])
    rank = dist.get_rank()
    differing = [SampleGroups("user")] if rank else []
    unknown, shape, dtype, kind, differs, both, no_effect, name, floats, untold, old = [
        error_of(TokenShuffler(extensions=[SampleGroups("users")]).plan, batch),
        error_of(_Wrong(torch.tensor([1, 2, 3])).plan, batch),
        error_of(_Wrong(torch.tensor([1.0, 2.0])).plan, batch),
        error_of(_Wrong([1, 2]).plan, batch),
        error_of(TokenShuffler, extensions=differing),
        error_of(UserShuffler, extensions=[SampleGroups("user")]),
        error_of(TokenShuffler, partitioner="karmarkar_karp", extensions=[SampleGroups("user")]),
        error_of(SampleGroups, 3),
        error_of(grouping().plan, _batch([1.5, 2.5], [3, 4])),
        error_of(TokenShuffler, extensions=[SampleGroups()]),
        error_of(TokenShuffler, group_feature="user"),
    ]
    assert "feature='users' is not among the batch's features: ['item', 'user']" in unknown
    assert "_Wrong.get_groups returned torch.int64 of (3,); expected an int64 or int32 tensor" in shape
    assert "_Wrong.get_groups returned torch.float32" in dtype
    assert "_Wrong.get_groups returned list" in kind
    assert "rank 1's shuffler has extensions=['sample_groups'], but rank 0's has []" in differs
    assert "feature='user' has no effect, because UserShuffler.get_groups" in both
    assert "feature='user': partitioner='karmarkar_karp' has no argument groups" in no_effect
    assert "SampleGroups.feature = 3 (int): expected str or None" in name
    assert "does not know the groups" in untold and "or TokenShuffler a method get_groups" in untold
    assert "TokenShuffler has no setting 'group_feature'" in old
    assert "feature='user' has torch.float32 values, expected integers" in floats


def _warnings() -> list[str]:
    with warnings_of("commons.distributed.shuffler_settings") as messages:
        UserShuffler()
    return messages


def test_groups_without_effect_are_named(pools):
    first, second = pools(2).run(_warnings)
    (line,) = first
    assert line.startswith("UserShuffler.get_groups has no effect without extensions=[SampleGroups()]")
    assert second == []


def test_a_batch_of_another_type_overrides_get_groups():
    shuffler = grouping()
    with pytest.raises(TypeError, match="this is a dict: give SampleGroups get_groups"):
        shuffler.extensions[0].columns({"ids": torch.zeros(2)})


def test_no_step_compiles():
    setup = "from commons.extensions.sample_groups import SampleGroups; extensions = [SampleGroups('user')]"
    before, after = before_and_after_placing(setup, "{'groups': tokens % 9}")
    assert before == after and "place_units" in before
