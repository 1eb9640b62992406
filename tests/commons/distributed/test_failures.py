"""An error of one rank is raised on all ranks in the same step, as what it is, and names that rank."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from commons.distributed import Extension
from commons.first_cause import show_first_cause_only
from tests.commons.distributed.errors_and_warnings import error_of_all
from tests.commons.distributed.internals import raised_on
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.histories import TokenShuffler
from tests.commons.pipeline.ranking_pipelines import ranking_pipeline
from tests.on_ranks import on_ranks


class CorruptShard(Exception):
    """Its `__init__` takes other arguments than it has then, as that of many programs' errors."""

    def __init__(self, path: str, row: int) -> None:
        super().__init__(f"{path} is corrupt at row {row}")


def _may_fail(hook: str) -> Callable[..., Any]:
    def called(self, *arguments):
        self.called(hook)
        return getattr(Extension, hook)(self, *arguments)

    return called


class Failing(Extension):
    """Raises an error in the call of a hook with this number, on some ranks."""

    name, order = "failing", 0

    def __init__(self, hook: str, on_ranks: tuple[int, ...], error: Exception, call: int = 1) -> None:
        self.hook, self.on_ranks, self.error, self.call = hook, on_ranks, error, call
        self.calls: Counter[str] = Counter()

    def called(self, hook: str) -> None:
        self.calls[hook] += 1
        if hook == self.hook and self.calls[hook] == self.call and dist.get_rank() in self.on_ranks:
            raise self.error

    agree, post, take = _may_fail("agree"), _may_fail("post"), _may_fail("take")
    place, before_copy = _may_fail("place"), _may_fail("before_copy")

    def columns(self, batch):
        self.called("columns")
        return {"known": batch.workload}


class FailingShuffler(FieldShuffler):
    """Its only extension may fail in `get_workloads`, too."""

    def get_workloads(self, batch):
        self.extensions[0].called("get_workloads")
        return super().get_workloads(batch)


@on_ranks(3)
def test_an_error_of_one_rank_is_raised_on_all_as_its_built_in_type():
    """Its name, text, traceback and rank come along."""
    is_here = dist.get_rank() == 1
    for hook, failure, kind, name in (
        ("get_workloads", CorruptShard("a.parquet", 7), Exception, "CorruptShard: "),
        ("columns", FileNotFoundError(2, "no such file", "c.parquet"), FileNotFoundError, ""),
        ("post", json.JSONDecodeError("no value", "{", 1), ValueError, "JSONDecodeError: "),
        ("agree", KeyError("d"), KeyError, ""),
        ("columns", UnicodeDecodeError("utf-8", b"?", 0, 1, "odd"), RuntimeError, "UnicodeDecodeError: "),
    ):
        shuffler = FailingShuffler(extensions=[Failing(hook, (1,), failure)])
        with pytest.raises((kind, type(failure))) as raised:
            shuffler.plan(lopsided_batch())
        error = raised.value
        assert type(error) is (type(failure) if is_here else kind)
        assert str(error) == (str(failure) if is_here or kind is KeyError else f"{name}{failure}")
        assert (error is failure) == is_here and raised_on(error) == (None if is_here else 1)
        assert any("raised on rank 1:" in note for note in getattr(error, "__notes__", [])) != is_here


MISSING, ODD = LookupError("no such row"), StopIteration("odd")  # the latter is not the end of the data


@pytest.mark.parametrize(
    ("hook", "ranks", "failure"),
    [
        *((hook, (1,), MISSING) for hook in ("get_workloads", "agree", "columns", "post")),
        *((hook, (0, 1), MISSING) for hook in ("columns", "take", "place", "before_copy")),
        ("columns", (0, 1), ODD),
        ("place", (0, 1), ODD),
    ],
)
@on_ranks(2)
def test_an_error_while_planning_ahead_ends_all_ranks_in_the_same_step(hook, ranks, failure):
    failing, steps = Failing(hook, ranks, failure, call=1 if hook == "agree" else 3), []
    shuffler = FailingShuffler(extensions=[failing])

    def loop() -> None:
        for _, plan in shuffler.plan_ahead(lopsided_batch() for _ in range(5)):
            steps.append(plan)

    expected = "raised StopIteration" if isinstance(failure, StopIteration) else f"LookupError: {failure}"
    assert expected in error_of_all(loop)
    assert len(steps) == failing.call - 1
    assert error_of_all(loop) == "no error" and len(steps) == failing.call + 4


@on_ranks(2)
def test_only_a_program_that_asks_gets_another_hook_and_but_one():
    def own_hook(*error):
        raise AssertionError("nothing fails here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", own_hook)
        show_first_cause_only.cache_clear()  # another test in this process may have called it
        FieldShuffler().shuffle(lopsided_batch())
        ranking_pipeline("native", TokenShuffler())
        assert sys.excepthook is own_hook
        show_first_cause_only()
        set_once = sys.excepthook
        show_first_cause_only()
        assert set_once is sys.excepthook is not own_hook
        show_first_cause_only.cache_clear()
