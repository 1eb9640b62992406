"""Groups of samples that a shuffler keeps on one rank."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.extensions.micro_batches import MicroBatches
from commons.extensions.pieces import Pieces
from commons.extensions.sample_groups import SampleGroups
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.compiled_kernels import before_and_after_placing
from tests.commons.distributed.counted_collectives import recorded_collectives
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.histories import TokenShuffler
from tests.on_ranks import on_ranks


class UserShuffler(TokenShuffler):
    """Samples of one user belong together, users 0 and 1 excepted."""

    def get_groups(self, batch):
        user = batch.features["user"].values()
        return torch.where(user < 2, -1, user)


def grouping() -> TokenShuffler:
    return TokenShuffler(extensions=[SampleGroups("user")])


def _batch(users: list[int], items: list[int]) -> BaseBatch:
    """Makes a batch of samples with one user and some items each; user −1 is none."""
    lengths = torch.tensor([*(int(user >= 0) for user in users), *items])
    values = torch.tensor([*(user for user in users if user >= 0), *range(sum(items))])
    return BaseBatch(KeyedJaggedTensor(["user", "item"], values, lengths=lengths), len(users), {})


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
def test_strict_groups_never_divide_and_balance_as_far_as_they_can():
    rank = dist.get_rank()
    strict = {"extensions": [SampleGroups("user", strict=True)], "equal_rows": False}
    shuffler = TokenShuffler(**strict)
    for step in range(6):
        rng = np.random.default_rng((step, rank))
        users, items = rng.integers(-1, 9, 10 + 2 * rank), rng.integers(1, 20, 10 + 2 * rank)
        batch = _batch(users.tolist(), items.tolist())
        plan = shuffler.plan(batch)
        placed = shuffler.exchange(batch, plan).features["user"].values().tolist()
        both = [placed, placed]
        dist.all_gather_object(both, placed)
        assert not set(both[0]) & set(both[1])
        groups = plan.rows.columns["groups"]
        assert sorted(both[0] + both[1]) == sorted(groups[groups >= 0])
        assert np.ptp(plan.loads) <= max(np.ptp(plan.loads_before), plan.loads.max() / 10)
    few = TokenShuffler(**{**strict, "extensions": [SampleGroups("user", strict=True)]}, max_tokens=20)
    error = error_of(few.plan, _batch([7, 8 + rank], [15, 1]))
    assert "ValueError: group 7 has" in error and "above max_tokens=20" in error


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({}, [], "equal_rows=True: SampleGroups(strict=True) needs equal_rows=False"),
        ({"equal_rows": False}, [MicroBatches(40)], "sample_groups excludes micro_batches"),
        ({"equal_rows": False}, [Pieces()], "sample_groups excludes pieces: strict groups do not divide"),
    ],
)
def test_strict_groups_are_refused_with_what_divides_them(settings, more, message):
    error = error_of(lambda: TokenShuffler(extensions=[SampleGroups("user", strict=True), *more], **settings))
    assert message in error


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


def test_hashes_name_groups_whatever_their_sign():
    hashes = torch.tensor([-5, 7, -(2**63), -5])
    keyed = KeyedJaggedTensor(["user"], hashes, lengths=torch.ones(4, dtype=torch.int64))
    groups = grouping().extensions[0].columns(BaseBatch(keyed, 4, {}))["groups"]
    assert (groups >= 0).all()
    assert (groups[:, None] == groups).equal(hashes[:, None] == hashes)


@on_ranks(2)
def test_errors():
    batch = _batch([1, 2], [3, 4])
    wrong = TokenShuffler(extensions=[SampleGroups(get_groups=lambda _: torch.tensor([1, 2, 3]))])
    for call, parts in (
        (lambda: TokenShuffler(extensions=[SampleGroups("users")]).plan(batch), ("KeyError", "'users'")),
        (lambda: wrong.plan(batch), ("get_groups returned", "(3,)", "int64")),
        (lambda: UserShuffler(extensions=[SampleGroups("user")]), ("no effect", "UserShuffler.get_groups")),
        (
            lambda: TokenShuffler(partitioner="karmarkar_karp", extensions=[SampleGroups("user")]),
            ("feature='user'", "'karmarkar_karp' has no argument groups"),
        ),
        (lambda: grouping().plan(_batch([1.5, 2.5], [3, 4])), ("float32", "expected integers")),
        (lambda: TokenShuffler(extensions=[SampleGroups()]), ("or TokenShuffler a method get_groups",)),
    ):
        error = error_of(call)
        assert all(part in error for part in parts), error


def test_no_step_compiles():
    setup = (
        "from commons.extensions.sample_groups import SampleGroups, rebalance_groups\n"
        "extensions = [SampleGroups('user')]"
    )
    columns = "{'groups': tokens % 9}, partitioner=rebalance_groups"
    before, after = before_and_after_placing(setup, columns)
    assert before == after and "place_units" in before
