"""Extensions: their hooks and the order of these, what a hook may do to a step, and what is refused."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commons.distributed import PARTITIONERS, Extension, ShufflePlan, ShufflerSettings
from tests.commons.distributed.errors_and_warnings import error_of, error_of_all
from tests.commons.distributed.internals import (
    RowTable,
    arguments_of,
    place_at_home,
    place_rows,
    token_tolerance,
)
from tests.commons.distributed.loaded_batches import lopsided_batch, sample_ids
from tests.commons.distributed.shufflers import Case, DictShuffler, FieldShuffler, Posting, cases, exchanged
from tests.drawn_batches import sample_contents
from tests.few_examples import few_examples
from tests.on_ranks import on_ranks


class Named(Extension):
    def __init__(self, name: str = "named", order: int = 0, excludes: dict[str, str] | None = None) -> None:
        self.name, self.order, self.excludes = name, order, excludes or {}


def _noted(hook: str) -> Callable[..., Any]:
    """Makes a hook that notes when it is called; one that wraps others, when it returns, too."""

    def noted(self, *arguments):
        self.notes.append(f"{self.name}: {hook}")
        result = getattr(Extension, hook)(self, *arguments)
        if hook in WRAPPING:
            self.notes.append(f"{self.name}: {hook} returns")
        return result

    return noted


WRAPPING = ("place", "around_exchange")
# The hooks of a shuffler's start and of a step; those that return come back from the inside.
ORDER = (
    *("setup", "warm_up"),
    *("post", "columns", "agree", "place", "place returns", "take"),
    *("before_copy", "around_exchange", "around_exchange returns", "after_exchange", "check_ran"),
)
NOTES = [f"{name}: {what}" for what in ORDER for name in ("cba" if what.endswith("returns") else "abc")]


class Noting(Named):
    """Notes the calls of its hooks, and has a process group of its own."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__(name, order=int(name == "c"))  # a and b by their names
        self.notes = notes

    def uses(self, device):
        return (self.name,)

    setup, warm_up, agree = _noted("setup"), _noted("warm_up"), _noted("agree")
    columns, post, take = _noted("columns"), _noted("post"), _noted("take")
    place, before_copy = _noted("place"), _noted("before_copy")
    around_exchange, after_exchange = _noted("around_exchange"), _noted("after_exchange")
    check_ran = _noted("check_ran")


@pytest.mark.parametrize("num_added", [0, 2])
@on_ranks(2)
def test_a_step_calls_the_hooks_in_one_order_whatever_the_order_given(num_added):
    plans, batch = [], lopsided_batch()
    for names in permutations("abc"):
        notes: list[str] = []
        extensions = [Noting(name, notes) for name in names]
        shuffler = FieldShuffler(extensions=extensions[: 3 - num_added])
        for extension in extensions[3 - num_added :]:
            notes.clear()  # all are set up again
            shuffler.add_extension(extension)
        assert [extension.name for extension in shuffler.extensions] == list("abc")
        plans.append(shuffler.plan(batch))
        shuffler.exchange(batch, plans[-1])
        shuffler.scale(torch.zeros(()), plans[-1], None)
        assert notes == NOTES and plans[-1] == plans[0] and plans[0].moves
    for name in "abc":
        assert dist.get_world_size(shuffler.group.group_for(name, torch.device("cpu"))) == 2
    assert "is, or was, in use: add named before" in error_of(shuffler.add_extension, Named())


def _of_another_shuffler() -> Extension:
    (extension,) = FieldShuffler(extensions=[Named()]).extensions
    return extension


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: [Named("a"), Named("b"), Named("a", 1)], "ValueError: extensions has a twice"),
        (lambda: [_of_another_shuffler()], "ValueError: named is part of another shuffler; make an object"),
        (
            lambda: [Named("a", excludes={"b": "both want the last word"}), Named("b", -1)],
            "ValueError: a excludes b: both want the last word",
        ),
    ],
)
def test_extensions_that_do_not_go_together_are_refused_when_given_or_added(make, error):
    extensions = make()
    assert error_of(FieldShuffler, extensions=extensions).startswith(error)
    shuffler = FieldShuffler(extensions=extensions[:-1])
    assert error_of(shuffler.add_extension, extensions[-1]).startswith(error)
    assert len(shuffler.extensions) == len(extensions) - 1


class Unsettled(Named):
    def setup(self, shuffler):
        raise ValueError("no source")


@on_ranks(2)
def test_an_extension_that_cannot_be_added_leaves_the_shuffler_as_it_was():
    shuffler = FieldShuffler(extensions=[Named("a")])
    assert error_of(shuffler.add_extension, Unsettled("b")) == "ValueError: no source"
    shuffler.add_extension(Named("b"))
    assert np.ptp(shuffler.plan(lopsided_batch()).num_placed) <= 1


@on_ranks(2)
def test_each_extension_places_by_and_takes_what_it_posted_on_every_rank():
    extensions = [Posting(f"{i}", i, count) for i, count in enumerate([2, 0, 1])]
    shuffler = FieldShuffler(extensions=extensions[::-1])
    for step in range(4):
        shuffler.plan(lopsided_batch() if step < 3 - dist.get_rank() else None)  # rank 1 ends first
    for extension in extensions:
        of_columns = 1000 * extension.order + 100 * np.arange(extension.num_posted)
        posted = [[(of_columns + 10 * step + rank).tolist() for rank in range(2)] for step in range(3)]
        assert extension.taken == posted
        assert extension.placed == list(zip([[4, 4], [4, 4], [4, 0]], posted, strict=True))


class Columns(Named):
    """Knows two numbers of each sample, of any size and sign."""

    def columns(self, batch):
        ids = batch.matrix[:, 0, 0].long()
        return {"smallest": ids + torch.iinfo(torch.int64).min, "negative": -ids}


class Choosing(Columns):
    """Places rows by workloads and by tokens, and takes what has the smaller largest load."""

    def place(self, rows, place):
        assert rows.columns.keys() == {"smallest", "negative"}
        plans = [place(rows), place(replace(rows, workloads=rows.tokens))]
        return min((replace(plan, rows=rows) for plan in plans), key=lambda plan: plan.loads.max())


class Staying(Columns):
    """Leaves all rows where they are, without a call of `place`."""

    def place(self, rows, place):
        return place_at_home(rows)


def _placed(case: Case, kind: type[Extension]) -> tuple[list, list, ShufflePlan, bool] | None:
    ran = exchanged(replace(case, settings={**case.settings, "extensions": [kind()]}))
    if ran is None:
        return None
    shuffler, plan, brought, moved = ran
    own = plan.computed_by(shuffler.group.rank)
    for name, column in Columns().columns(moved).items():
        assert plan.rows.columns[name][own].tolist() == column[: len(own)].tolist()
    return sample_contents(brought), sample_contents(moved), plan, plan.moves


@few_examples  # each exchanges
@given(case=cases(2), kind=st.sampled_from([Columns, Choosing, Staying]))
def test_columns_travel_with_rows_that_are_placed_once_several_times_or_not_at_all(pools, case, kind):
    results = pools(2).run(_placed, case, kind)
    if results[0] is None:
        assert results == [None, None]
        return
    before, after = (Counter(content for result in results for content in result[i]) for i in (0, 1))
    assert before == after and results[0][2:] == results[1][2:]
    if kind is Staying:
        assert all(loaded == placed for loaded, placed, *_ in results) and not results[0][3]


def test_a_partitioner_gets_the_columns_and_arguments_that_it_names(monkeypatch):
    def by_user(workloads, num_partitions, user=None, stride=None, tolerance=None):
        assert (stride, tolerance) == (2, 0.25)
        user = np.arange(len(workloads)) if user is None else user
        return [np.flatnonzero(user // stride % num_partitions == part) for part in range(num_partitions)]

    monkeypatch.setitem(PARTITIONERS, "by user", by_user)
    extension = Named()
    extension.partitioner_arguments = {"stride": 2, "tolerance": 0.25, "token_tolerance": None, "unknown": 1}
    users, ones = np.array([0, 2, 3, 8, 9, 2]), np.ones(6, dtype=np.int64)
    each, columns = np.array([3, 3]), {"user": users, "other": users}
    rows = RowTable(each, each, ones, ones, ones, ones[:, None], ones, ones[:, None], columns=columns)
    rows = replace(rows, arguments=arguments_of([extension]))
    # Kept although it is worse than as loaded: the partitioner heeds what the core does not know.
    by_user_settings = ShufflerSettings("by user", tolerance=0.5, equal_rows=False)
    assert place_rows(rows, by_user_settings).tolist() == (users // 2 % 2).tolist()
    brought = replace(rows, partitioner=by_user)  # by an extension, which need not register it
    settings = ShufflerSettings(tolerance=0.5, equal_rows=False)
    assert place_rows(brought, settings).tolist() == (users // 2 % 2).tolist()
    assert token_tolerance(rows, ShufflerSettings(token_tolerance=0.5)) is None


class Handling(Named):
    seen = (0, 0)

    def around_exchange(self, rows, plan, exchange):
        moved = exchange(rows, plan)
        self.seen = (len(rows.lengths), len(moved["matrix"]))
        return moved

    def after_exchange(self, batch, plan):
        return [self.name, batch]


@on_ranks(2)
def test_extensions_see_every_exchange_and_its_batch():
    extensions = [Handling("a", 0), Handling("b", 1)]
    shuffler, rank = FieldShuffler(extensions=extensions, equal_rows=False), dist.get_rank()
    heavy = lopsided_batch()
    heavy.workload[0] += 1000 * (rank == 0)
    even = replace(heavy, workload=torch.ones(4, dtype=torch.int64))
    for batch, moves in ((heavy, True), (even, False)):
        plan = shuffler.plan(batch)
        outer, [inner, moved] = shuffler.exchange(batch, plan)
        assert plan.moves == moves
        assert (outer, inner) == ("b", "a") and sample_ids(moved)
        assert [of.seen for of in extensions] == [(batch.batch_size, plan.num_rows[rank])] * 2


class Cutting(Named):
    """Takes a row off each batch before the copy, once."""

    def before_copy(self, rows, plan):
        if rows.num_rows < len(plan.rows.home):
            return rows
        assert threading.current_thread() is not threading.main_thread()
        return rows.replaced({"workload": rows.fields["workload"][1:]}, rows.num_rows - 1, rows.num_rows - 1)


def test_a_planned_batch_is_changed_once_before_the_copy():
    shuffler = DictShuffler(extensions=[Cutting()])
    for batch, plan in shuffler.plan_ahead([{"workload": torch.arange(3)}] * 3):
        assert batch["workload"].tolist() == [1, 2]
        assert shuffler.exchange(batch, plan) is batch


class Given(Named):
    """Has what it is given: a setting, something that ranks have to agree on, and columns."""

    def __init__(self, name: str = "given", value: int = 0, agreed: Any = None, columns: Any = None) -> None:
        super().__init__(name)
        self.value, self.agreed, self.given_columns = value, agreed, columns or {}

    def settings(self):
        return {"value": self.value}

    def agree(self, batch, row_format):
        return self.agreed

    def columns(self, batch):
        return self.given_columns


class Connecting(Named):
    """Waits for the other ranks when it is set up."""

    def setup(self, shuffler):
        shuffler.group.channel()


def _check_refused_by_all(message: str, extensions: list[Extension]) -> None:
    error = error_of_all(lambda: FieldShuffler(extensions=extensions).plan(lopsided_batch()))
    assert error.startswith("ValueError: ") and message in error, error


@on_ranks(2)
def test_columns_that_cannot_be_gathered_are_the_same_error_on_all_ranks():
    good, later = {"known": torch.arange(4)}, Given()
    later.given_columns = good
    shuffler = FieldShuffler(extensions=[later])
    shuffler.plan(lopsided_batch())
    for column, message in (
        (torch.arange(3), "given.columns()['known'] is torch.int64 of (3,); expected torch.int64"),
        (torch.arange(4).int(), "given.columns()['known'] is torch.int32 of (4,); expected"),
    ):
        later.given_columns = {"known": column} if dist.get_rank() == 1 else good
        assert message in error_of_all(shuffler.plan, lopsided_batch())
        _check_refused_by_all(message, [Given(columns=later.given_columns)])
    later.given_columns = {} if dist.get_rank() == 1 else good
    assert "get_workloads, and known" in error_of_all(shuffler.plan, lopsided_batch())  # in the first batch
    message = "b.columns()['known']: there is another column of this name"
    _check_refused_by_all(message, [Given(name, columns=good) for name in ("a", "b")])


@on_ranks(2)
def test_extensions_that_differ_between_ranks_are_refused_on_all():
    rank = dist.get_rank()
    on_one_rank = [Connecting("connecting", 0)] if rank == 1 else []
    for extensions, message in (
        ([Given(value=3 + rank)], "rank 1's shuffler has given={'value': 4}, but rank 0's has {'value': 3}"),
        ([Given(agreed=("rule", rank))], "rank 1's batch has ('rule', 1) for given, but that of rank 0 has"),
        (
            [*on_one_rank, Connecting("other", 1)],
            "rank 1's shuffler has extensions=['connecting', 'other'], but rank 0's has ['other']",
        ),
        ([Columns() if rank == 1 else Named()], "and smallest, negative, but rank 0 has 1 columns"),
        ([Posting("posting", 0, 2 + rank)], "the ranks 0 and 1"),
    ):
        _check_refused_by_all(message, extensions)
