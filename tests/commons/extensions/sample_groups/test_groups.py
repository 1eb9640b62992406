"""Groups of samples that a shuffler keeps on one rank."""

from __future__ import annotations

import numpy as np
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
    together, alone = map(_ranks_of_users, (grouping(tolerance=0.03), TokenShuffler(partitioner="refined")))
    assert all(pairs <= users + 1 for users, pairs in together)
    assert all(pairs >= 1.5 * users for users, pairs in alone)


@on_ranks(2)
def test_samples_of_a_group_come_together_and_others_stay():
    """Users 0 and 1 of `get_groups`, and user −1 of a feature, are in no group."""
    for shuffler, users, of_ranks in (
        (grouping(), [5, 6, 7, 8][:: 1 - 2 * dist.get_rank()], None),
        (UserShuffler(extensions=[SampleGroups()]), [0, 1, 5, 5], [0, 0, 1, 1, 5, 5, 5, 5]),
        (grouping(), [-1] * 4, []),
    ):
        placed = shuffler.shuffle(_batch(users, [3] * 4)).features["user"].values().tolist()
        both = [placed, placed]
        dist.all_gather_object(both, placed)
        assert sorted([*both[0], *both[1]]) == (sorted(2 * users) if of_ranks is None else of_ranks)
        grouped = [set(each) - {0, 1} for each in both]
        assert not grouped[0] & grouped[1]


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
    for call, parts in (
        (
            lambda: TokenShuffler(extensions=[SampleGroups("users")]).plan(batch),
            ("'users'", "['item', 'user']"),
        ),
        (
            lambda: _Wrong(torch.tensor([1, 2, 3])).plan(batch),
            ("_Wrong.get_groups", "(3,)", "int64"),
        ),
        (lambda: _Wrong([1, 2]).plan(batch), ("_Wrong.get_groups", "list")),
        (lambda: UserShuffler(extensions=[SampleGroups("user")]), ("no effect", "UserShuffler.get_groups")),
        (
            lambda: TokenShuffler(partitioner="karmarkar_karp", extensions=[SampleGroups("user")]),
            ("feature='user'", "'karmarkar_karp' has no argument groups"),
        ),
        (lambda: SampleGroups(3), ("feature = 3", "expected str or None")),
        (lambda: grouping().plan(_batch([1.5, 2.5], [3, 4])), ("float32", "expected integers")),
        (lambda: TokenShuffler(extensions=[SampleGroups()]), ("or TokenShuffler a method get_groups",)),
        (lambda: grouping().extensions[0].columns({"ids": batch}), ("dict", "give SampleGroups get_groups")),
    ):
        error = error_of(call)
        assert all(part in error for part in parts), error


@on_ranks(2)
def test_groups_without_effect_are_named_by_rank_0():
    with warnings_of("commons.distributed.shuffler_settings") as messages:
        UserShuffler()
    assert len(messages) == (dist.get_rank() == 0)
    assert all("UserShuffler.get_groups has no effect" in line for line in messages)


def test_no_step_compiles():
    setup = "from commons.extensions.sample_groups import SampleGroups; extensions = [SampleGroups('user')]"
    before, after = before_and_after_placing(setup, "{'groups': tokens % 9}")
    assert before == after and "place_units" in before
