"""The seam between a shuffler and its extensions."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.distributed import Extension, ShufflePlan
from commons.distributed.extension import chain, order_extensions
from commons.distributed.placement import arguments_of, place_at_home, place_rows, token_tolerance
from commons.distributed.rank_group import RankGroup
from commons.distributed.row_table import RowTable
from commons.distributed.shuffler_settings import PARTITIONERS, ShufflerSettings
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import lopsided_batch, sample_ids
from tests.commons.distributed.shufflers import Case, DictShuffler, FieldShuffler, cases, exchanged
from tests.drawn_batches import sample_contents


class Named(Extension):
    """An extension of any name and order."""

    def __init__(self, name: str = "named", order: int = 0, excludes: dict[str, str] | None = None) -> None:
        self.name, self.order, self.excludes = name, order, excludes or {}


class Noting(Named):
    """Notes when its hooks are called, and when the calls that they wrap have returned."""

    def __init__(self, name: str, order: int, notes: list[str]) -> None:
        super().__init__(name, order)
        self.notes = notes

    def _note(self, what: str) -> None:
        self.notes.append(f"{self.name}: {what}")

    def setup(self, shuffler):
        self._note(f"setup {shuffler.group.num_ranks}")

    def warm_up(self):
        self._note("warm up")

    def agree(self, batch, row_format):
        self._note("agree")

    def columns(self, batch):
        self._note("columns")
        return {}

    def post(self):
        self._note("post")
        return super().post()

    def take(self, posted):
        self._note("take")

    def place(self, rows, place):
        self._note(f"place {rows.num_ranks}")
        plan = place(rows)
        self._note("placed")
        return plan

    def before_copy(self, rows, plan):
        self._note("before copy")
        return rows

    def around_exchange(self, rows, plan, exchange):
        self._note("exchange")
        moved = exchange(rows, plan)
        self._note("exchanged")
        return moved

    def after_exchange(self, batch, plan):
        self._note("after exchange")
        return batch

    def check_ran(self, plan):
        self._note("check ran")


def _each(what: str) -> list[str]:
    return [f"{name}: {what}" for name in "abc"]


NOTES = [
    *_each("setup 2"),
    *_each("warm up"),
    *_each("post"),
    *_each("columns"),
    *_each("agree"),
    *_each("place 2"),
    *_each("placed")[::-1],
    *_each("take"),
    *_each("before copy"),
    *_each("exchange"),
    *_each("exchanged")[::-1],
    *_each("after exchange"),
    *_each("check ran"),
]


def _steps_with_extensions_in_any_order() -> list[tuple[list[str], ShufflePlan]]:
    steps = []
    for given_order in permutations("abc"):
        notes: list[str] = []
        extensions = [Noting(name, "abc".index(name), notes) for name in given_order]
        shuffler, batch = FieldShuffler(extensions=extensions), lopsided_batch()
        assert [extension.name for extension in shuffler.extensions] == list("abc")
        plan = shuffler.plan(batch)
        shuffler.exchange(batch, plan)
        shuffler.scale(torch.zeros(()), plan, None)
        steps.append((notes, plan))
    return steps


def test_a_step_calls_the_hooks_in_one_order_whatever_the_order_given(pools):
    for steps in pools(2).run(_steps_with_extensions_in_any_order):
        for notes, plan in steps:
            assert notes == NOTES and plan == steps[0][1] and plan.moves


@given(orders=st.lists(st.integers(-3, 3), max_size=6), shuffle=st.randoms())
def test_a_extension_wraps_those_of_a_larger_order(orders, shuffle):
    notes: list[str] = []
    extensions: list[Extension] = [Noting(f"{i}", order, notes) for i, order in enumerate(orders)]
    expected = sorted(extensions, key=lambda extension: (extension.order, extension.name))
    extensions += [Named(f"without hooks {order}", order) for order in (-4, 0, 4)]
    shuffle.shuffle(extensions)
    ordered = order_extensions(extensions)
    assert [extension for extension in ordered if extension in expected] == expected

    def innermost(rows, plan):
        notes.append("moved")
        return rows, plan

    assert chain(ordered, "around_exchange", innermost)("rows", "plan") == ("rows", "plan")
    names = [extension.name for extension in expected]
    before, after = ([f"{name}: {what}" for name in names] for what in ("exchange", "exchanged"))
    assert notes == [*before, "moved", *after[::-1]]


@pytest.mark.parametrize(
    ("extensions", "error"),
    [
        ([Named("a"), "b"], r"TypeError: extensions has 'b'; expected objects such as Pieces\(\)"),
        ([Named], r"TypeError: extensions has <class '.*Named'>; expected objects such as Pieces\(\)"),
        (Named(), r"TypeError: extensions is <.*Named.*>; expected a list of objects such as Pieces\(\)"),
        (None, r"TypeError: extensions is None; expected a list of objects such as Pieces\(\)"),
        ([Named("a"), Named("b"), Named("a", 1)], "ValueError: extensions has a twice; expected one of each"),
        (
            [Named("a", excludes={"b": "both want the last word"}), Named("b", -1)],
            "ValueError: a excludes b: both want the last word",
        ),
    ],
)
def test_extensions_that_do_not_go_together_are_refused(extensions, error):
    assert re.fullmatch(error, error_of(FieldShuffler, extensions=extensions))
    (alone,) = FieldShuffler(extensions=(Named("b", excludes={"c": "which is not there"}),)).extensions
    assert alone.name == "b"


class Posting(Named):
    """Posts numbers that tell the extension, the step and the rank."""

    def __init__(self, name: str, order: int, count: int) -> None:
        super().__init__(name, order)
        self.count, self.step, self.placed, self.taken = count, 0, [], []

    @property
    def num_posted(self):
        return self.count

    def post(self):
        self.step += 1
        return self._numbers(self.step, dist.get_rank())

    def place(self, rows, place):
        self._check(rows.posts[self.name])
        self.placed.append(rows.num_loaded.tolist())
        return place(rows)

    def take(self, posted):
        self._check(posted)
        self.taken.append(self.step)

    def _check(self, posted: np.ndarray) -> None:
        expected = [self._numbers(self.step, rank) for rank in range(dist.get_world_size())]
        np.testing.assert_array_equal(posted, np.stack(expected))

    def _numbers(self, step: int, rank: int) -> np.ndarray:
        return np.arange(self.count) + 10 * rank + 100 * step - 10_000 * self.order


def test_a_extension_serves_one_shuffler():
    extension = Named()
    FieldShuffler(extensions=[extension])
    with pytest.raises(ValueError, match="named is part of another shuffler; make an object for each"):
        FieldShuffler(extensions=[extension])


class Connected(Noting):
    """Needs a process group of its own."""

    def uses(self, device):
        return (self.name,)


def _notes_of_added_ones() -> list[str]:
    notes: list[str] = []
    a, b, c = (Connected(name, order, notes) for order, name in enumerate("abc"))
    shuffler, batch = FieldShuffler(extensions=[b]), lopsided_batch()
    shuffler.add_extension(c)
    notes.clear()
    shuffler.add_extension(a)
    assert shuffler.extensions == (a, b, c) and all(each.is_taken for each in (a, b, c))
    plan = shuffler.plan(batch)
    shuffler.exchange(batch, plan)
    shuffler.scale(torch.zeros(()), plan, None)
    for name in "abc":
        assert dist.get_world_size(shuffler.group.group_for(name, torch.device("cpu"))) == 2
    assert "is, or was, in use: add named before" in error_of(shuffler.add_extension, Named())
    return notes


def test_an_added_extension_is_as_one_given_to_the_constructor(pools):
    assert pools(2).run(_notes_of_added_ones) == [NOTES] * 2


def test_an_added_extension_is_checked_as_one_given_to_the_constructor():
    shuffler = FieldShuffler(extensions=[Named("a", excludes={"b": "both want the last word"})])
    refused = [
        error_of(shuffler.add_extension, Named("a")),
        error_of(shuffler.add_extension, Named("b")),
        error_of(shuffler.add_extension, *shuffler.extensions),
        error_of(FieldShuffler().add_extension, *shuffler.extensions),
    ]
    assert refused == [
        "ValueError: extensions has a twice; expected one of each",
        "ValueError: a excludes b: both want the last word",
        "ValueError: extensions has a twice; expected one of each",
        "ValueError: a is part of another shuffler; make an object for each",
    ]
    assert len(shuffler.extensions) == 1


class Unsettled(Named):
    """Fails when it is set up."""

    def setup(self, shuffler):
        raise ValueError("no source")


class Incomplete(Extension):
    """Has no order, and a property that fails."""

    name = "incomplete"

    @property
    def source(self):
        return self.given  # which nobody sets


def _plan_after_a_failed_extension() -> list[int]:
    shuffler = FieldShuffler(extensions=[Named("a")])
    assert error_of(shuffler.add_extension, Unsettled("b")) == "ValueError: no source"
    shuffler.add_extension(Named("b"))
    return shuffler.plan(lopsided_batch()).num_placed.tolist()


def test_an_extension_that_cannot_be_added_leaves_the_shuffler_as_it_was(pools):
    first, second = pools(2).run(_plan_after_a_failed_extension)
    assert first == second and max(first) - min(first) <= 1


def test_an_incomplete_extension_says_what_is_missing():
    assert (
        error_of(FieldShuffler, extensions=[Incomplete()])
        == "TypeError: Incomplete has no order: set it in the class"
    )
    with pytest.raises(AttributeError, match="Incomplete has no given"):
        _ = Incomplete().source


def _posts(counts: list[int]) -> list[list[list[int]]]:
    extensions = [Posting(f"{i}", i, count) for i, count in enumerate(counts)]
    shuffler = FieldShuffler(extensions=extensions[::-1])
    for step in range(4):
        batch = lopsided_batch() if step < 3 - dist.get_rank() else None  # rank 1 ends first, then all have
        shuffler.plan(batch)
    assert all(extension.taken == [1, 2, 3] for extension in extensions)
    return [extension.placed for extension in extensions]


@pytest.mark.parametrize("counts", [[0], [3], [2, 0, 1]])
def test_each_extension_places_by_and_takes_what_it_posted_on_every_rank(pools, counts):
    loaded_by_step = [[4, 4], [4, 4], [4, 0]]
    assert pools(2).run(_posts, counts) == [[loaded_by_step] * len(counts)] * 2


class Columns(Extension):
    """Knows two numbers of each sample, of any size and sign."""

    name, order = "columns", 0

    def columns(self, batch):
        ids = batch.matrix[:, 0, 0].long()
        return {"smallest": ids + torch.iinfo(torch.int64).min, "negative": -ids}

    def place(self, rows, place):
        plan = place(rows)
        assert plan.rows.columns.keys() == rows.columns.keys() == {"smallest", "negative"}
        return plan


def _columns_of_a_step(case: Case) -> bool:
    ran = exchanged(replace(case, settings={**case.settings, "extensions": [Columns()]}))
    if ran is None:
        return True
    shuffler, plan, _, moved = ran
    own = plan.computed_by(shuffler.group.rank)
    columns = {name: column[own].tolist() for name, column in plan.rows.columns.items()}
    return columns == {name: of[: len(own)].tolist() for name, of in Columns().columns(moved).items()}


@settings(max_examples=10, deadline=None)
@given(case=cases(2))
def test_columns_travel_with_their_rows(pools, case):
    assert all(pools(2).run(_columns_of_a_step, case))


def test_a_partitioner_gets_the_columns_and_arguments_that_it_names(monkeypatch):
    def by_user(workloads, num_partitions, user=None, stride=None, tolerance=None):
        assert (stride, tolerance) == (2, 0.25)
        user = np.arange(len(workloads)) if user is None else user
        return [np.flatnonzero(user // stride % num_partitions == part) for part in range(num_partitions)]

    monkeypatch.setitem(PARTITIONERS, "by user", by_user)
    extension = Named()
    extension.partitioner_arguments = {"stride": 2, "tolerance": 0.25, "unknown": 1}
    settings = ShufflerSettings("by user", tolerance=0.5, equal_rows=False)
    users, ones = np.array([0, 2, 3, 8, 9, 2]), np.ones(6, dtype=np.int64)
    each, columns = np.array([3, 3]), {"user": users, "other": users}
    rows = RowTable(each, each, ones, ones, ones, ones[:, None], ones, ones[:, None], columns=columns)
    rows = replace(rows, arguments=arguments_of([extension]))
    # Kept although it is worse than as loaded: the partitioner heeds what the core does not know.
    assert place_rows(rows, settings).tolist() == (users // 2 % 2).tolist()


def test_an_argument_of_a_extension_takes_the_place_of_a_setting():
    extension = Named()
    extension.partitioner_arguments = {"token_tolerance": None}
    rows = replace(RowTable.empty(2), arguments=arguments_of([extension]))
    assert token_tolerance(rows, ShufflerSettings(token_tolerance=0.5)) is None


class Choosing(Named):
    """Places rows by workloads and by tokens, and takes what has the smaller largest load."""

    def place(self, rows, place):
        plans = [place(rows), place(replace(rows, workloads=rows.tokens))]
        return min((replace(plan, rows=rows) for plan in plans), key=lambda plan: plan.loads.max())


class Staying(Named):
    """Leaves all rows where they are, without a call of `place`."""

    def place(self, rows, place):
        return place_at_home(rows)


def _placed(case: Case, kind: type[Extension]) -> tuple[list, list, int, bool] | None:
    ran = exchanged(replace(case, settings={**case.settings, "extensions": [kind()]}))
    if ran is None:
        return None
    _, plan, brought, moved = ran
    return sample_contents(brought), sample_contents(moved), plan.fingerprint, plan.moves


@settings(max_examples=10, deadline=None)
@given(case=cases(2), kind=st.sampled_from([Choosing, Staying]))
def test_a_extension_may_place_several_times_or_not_at_all(pools, case, kind):
    results = pools(2).run(_placed, case, kind)
    if results[0] is None:
        assert results == [None, None]
        return
    before, after = (Counter(content for result in results for content in result[i]) for i in (0, 1))
    assert before == after and results[0][2:] == results[1][2:]
    if kind is Staying:
        assert all(loaded == placed for loaded, placed, *_ in results) and not results[0][3]


def _places_of_a_pipeline() -> list[str]:
    """Returns what an extension notes where ranks 0 and 2 exchange, and rank 1 is alone."""
    pairs, notes = [dist.new_group(ranks) for ranks in ([0, 2], [1])], []
    extensions = [Noting("a", 1, notes)]
    shuffler = FieldShuffler(pairs[dist.get_rank() % 2], extensions=extensions)
    shuffler.plan_over(RankGroup.of())
    shuffler.plan(lopsided_batch())
    return [note for note in notes if "setup" in note or "place" in note]


def test_a_extension_places_the_ranks_that_exchange(pools):
    for rank, notes in enumerate(pools(3).run(_places_of_a_pipeline)):
        num_ranks = 1 if rank == 1 else 2
        assert notes == [f"a: setup {num_ranks}"] * 2 + [f"a: place {num_ranks}", "a: placed"]


class Handling(Named):
    """Looks at the rows that are exchanged, and wraps the batch after it."""

    def __init__(self, name: str, order: int) -> None:
        super().__init__(name, order)
        self.seen: list[tuple[int, int]] = []

    def around_exchange(self, rows, plan, exchange):
        moved = exchange(rows, plan)
        self.seen.append((len(rows.lengths), len(moved["matrix"])))
        return moved

    def after_exchange(self, batch, plan):
        return [self.name, batch]


def _handled() -> list[bool]:
    moves = []
    extensions = [Handling("a", 0), Handling("b", 1)]
    shuffler, rank = FieldShuffler(extensions=extensions, equal_rows=False), dist.get_rank()
    heavy = lopsided_batch()
    heavy.workload[0] += 1000 * (rank == 0)
    even = replace(heavy, workload=torch.ones(4, dtype=torch.int64))
    for batch in (heavy, even):
        plan = shuffler.plan(batch)
        outer, [inner, moved] = shuffler.exchange(batch, plan)
        assert (outer, inner) == ("b", "a") and sample_ids(moved)
        assert extensions[0].seen == extensions[1].seen
        assert extensions[0].seen[-1] == (batch.batch_size, plan.num_rows[rank])
        moves.append(plan.moves)
    return moves


def test_extensions_see_every_exchange_and_its_batch(pools):
    assert pools(2).run(_handled) == [[True, False]] * 2


class Cutting(Named):
    """Takes a row off each batch before the copy, once."""

    def before_copy(self, rows, plan):
        if rows.num_rows < len(plan.rows.home):
            return rows
        return rows.replaced({"workload": rows.fields["workload"][1:]}, rows.num_rows - 1, rows.num_rows - 1)


def test_a_planned_batch_is_changed_once_before_the_copy():
    shuffler = DictShuffler(extensions=[Cutting()])
    for batch, plan in shuffler.plan_ahead([{"workload": torch.arange(3)}] * 3):
        assert batch["workload"].tolist() == [1, 2]
        assert shuffler.exchange(batch, plan) is batch


class Failing(Named):
    """Raises an error in the third call of a hook on some ranks; of `agree`, in the first."""

    def __init__(self, hook: str, on_ranks: tuple[int, ...], error: Exception) -> None:
        super().__init__()
        self.hook, self.left = hook, 0 if hook == "agree" else 2
        self.on_ranks, self.error = on_ranks, error

    def _called(self, hook: str) -> None:
        if hook == self.hook:
            self.left -= 1
            if self.left == -1 and dist.get_rank() in self.on_ranks:
                raise self.error

    def agree(self, batch, row_format):
        self._called("agree")

    def columns(self, batch):
        self._called("columns")
        return {"known": batch.workload}

    def post(self):
        self._called("post")
        return super().post()

    def take(self, posted):
        self._called("take")

    def place(self, rows, place):
        self._called("place")
        return place(rows)

    def before_copy(self, rows, plan):
        self._called("before_copy")
        return rows


def _errors_of_hooks(hook: str, on_ranks: tuple[int, ...], error: Exception) -> tuple[int, str, str]:
    """Returns the steps of a loop, the error that ended it, and that of a loop after it."""
    shuffler, steps = FieldShuffler(extensions=[Failing(hook, on_ranks, error)]), 0

    def loop() -> None:
        nonlocal steps
        for _ in shuffler.plan_ahead(lopsided_batch() for _ in range(5)):
            steps += 1

    failed = error_of(loop).partition("\n")[0]
    return steps, failed, error_of(loop)


@pytest.mark.parametrize(
    ("hook", "on_ranks"),
    [
        ("agree", (1,)),
        ("columns", (1,)),
        ("post", (1,)),
        *[(hook, (0, 1)) for hook in ("agree", "columns", "post", "take", "place", "before_copy")],
    ],
)
def test_an_error_in_the_planning_thread_ends_all_ranks_in_the_same_step(pools, hook, on_ranks):
    steps = 0 if hook == "agree" else 2
    found = pools(2).run(_errors_of_hooks, hook, on_ranks, LookupError("no such row"))
    assert found == [(steps, "LookupError: no such row", "no error")] * 2


@pytest.mark.parametrize("hook", ["columns", "place"])
def test_a_stopped_iteration_in_a_hook_is_not_the_end_of_the_data(pools, hook):
    for steps, error, after in pools(2).run(_errors_of_hooks, hook, (0, 1), StopIteration("odd")):
        assert steps == 2 and after == "no error"
        assert error.startswith("RuntimeError: ") and "raised StopIteration('odd')" in error


class Returning(Named):
    """Has these columns on rank 1, and good ones elsewhere."""

    def __init__(self, columns: Any, name: str = "returning") -> None:
        super().__init__(name)
        self._columns = columns

    def columns(self, batch):
        return self._columns if dist.get_rank() == 1 else {"known": batch.workload}


BAD_COLUMNS = [
    (torch.arange(3), "is torch.int64 of (3,); expected torch.int64, one per row: (4,)"),
    (torch.arange(8).view(4, 2), "is torch.int64 of (4, 2); expected"),
    (torch.rand(4), "is torch.float32 of (4,); expected"),
    (torch.arange(4).int(), "is torch.int32 of (4,); expected"),
]


def _errors_of_columns() -> list[str]:
    """Returns errors in the first step of a shuffler, and in its second."""
    errors, batch = [], lopsided_batch()
    for column, _ in BAD_COLUMNS:
        errors.append(error_of(FieldShuffler(extensions=[Returning({"known": column})]).plan, batch))
    extension = Returning({"known": torch.arange(4)})
    shuffler = FieldShuffler(extensions=[extension])
    shuffler.plan(batch)
    for column, _ in BAD_COLUMNS:
        extension._columns = {"known": column}
        errors.append(error_of(shuffler.plan, batch))
    extension._columns = {}
    errors.append(error_of(shuffler.plan, batch))
    twice = [Returning({"known": torch.arange(4)}, name) for name in ("a", "b")]
    errors.append(error_of(FieldShuffler(extensions=twice).plan, batch))
    return [error.partition("\n")[0] for error in errors]


def test_columns_that_cannot_be_gathered_are_the_same_error_on_all_ranks(pools):
    first, second = pools(2).run(_errors_of_columns)
    assert first == second
    expected = [f"returning.columns()['known'] {message}" for _, message in BAD_COLUMNS] * 2
    expected.append("the first batch has 1 columns of get_workloads, row_counts of (), and known")
    expected.append("b.columns()['known']: another extension has a column of this name, too")
    for error, message in zip(first, expected, strict=True):
        assert error.startswith("ValueError: ") and message in error


class Setting(Named):
    """Has a setting, and something that ranks have to agree on."""

    def __init__(self, value: Any, agreed: Any = None) -> None:
        super().__init__("setting")
        self.value, self.agreed = value, agreed

    def settings(self):
        return {"value": self.value}

    def agree(self, batch, row_format):
        return self.agreed


class Connecting(Named):
    """Waits for the other ranks when it is set up."""

    def setup(self, shuffler):
        shuffler.group.channel()


def _errors_of_other_extensions() -> list[str]:
    rank, batch = dist.get_rank(), lopsided_batch()
    on_one_rank = [Connecting("connecting", 0)] if rank == 1 else []
    extensions: list[list[Extension]] = [
        [Setting(3 + rank)],
        [Setting(3, agreed=("rule", rank))],
        [*on_one_rank, Connecting("other", 1)],
        [Columns() if rank == 1 else Named("columns")],
        [Posting("posting", 0, 2 + rank)],
    ]
    return [error_of(lambda given=given: FieldShuffler(extensions=given).plan(batch)) for given in extensions]


def test_extensions_that_differ_between_ranks_are_refused_on_all(pools):
    first, second = pools(2).run(_errors_of_other_extensions)
    assert first == second
    for error, expected in zip(
        first,
        [
            "rank 1's shuffler has setting={'value': 4}, but rank 0's has {'value': 3}; all ranks need the",
            "rank 1's batch has ('rule', 1) for setting, but that of rank 0 has ('rule', 0); all ranks need",
            "rank 1's shuffler has extensions=['connecting', 'other'], but rank 0's has ['other']; all",
            "and smallest, negative, but rank 0 has 1 columns of get_workloads",
            "the ranks 0 and 1",
        ],
        strict=True,
    ):
        assert error.startswith("ValueError: ") and expected in error
