"""A rank's failure names its cause on the others, and only a program that asks gets another hook for it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from types import ModuleType, TracebackType

import numpy as np
import pytest
import torch.distributed as dist

from commons.distributed import show_first_cause_only
from commons.distributed.channel import raised_on
from commons.distributed.rank_group import RankGroup
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import lopsided_batch
from tests.commons.distributed.shufflers import FieldShuffler
from tests.commons.histories import TokenShuffler
from tests.commons.pipeline.ranking_pipelines import ranking_pipeline
from tests.on_ranks import on_ranks
from tests.process_pool import ProcessPool, RankError


def _own_hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    raise AssertionError("nothing fails here")


@on_ranks(2)
def test_a_shuffler_and_a_pipeline_leave_a_programs_hook_alone():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", _own_hook)
        show_first_cause_only.cache_clear()  # another test in this process may have called it
        FieldShuffler().shuffle(lopsided_batch())
        ranking_pipeline("native", TokenShuffler())
        assert sys.excepthook is _own_hook


@on_ranks(1)
def test_a_program_that_asks_twice_gets_one_hook():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", _own_hook)
        show_first_cause_only.cache_clear()
        show_first_cause_only()
        set_once = sys.excepthook
        show_first_cause_only()
        assert set_once is sys.excepthook is not _own_hook
        show_first_cause_only.cache_clear()


class _Failing(FieldShuffler):
    def get_workloads(self, batch):
        if dist.get_rank() == 1:
            raise LookupError("no price for this sample")
        return super().get_workloads(batch)


@on_ranks(3)
def test_an_error_names_the_rank_that_raised_it():
    error = error_of(_Failing().plan, lopsided_batch())
    assert error.startswith("LookupError: no price for this sample")
    assert ("raised on rank 1:" in error) == (dist.get_rank() != 1)


class CorruptShard(Exception):
    """Its `__init__` takes other arguments than it has then, as that of many programs' errors."""

    def __init__(self, path: str, row: int) -> None:
        super().__init__(f"{path} is corrupt at row {row}")
        self.row = row


class Unreadable(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(5, "cannot be read", path)


@dataclass(frozen=True)
class BadRecord(Exception):
    """It refuses to be changed."""

    record: int


class Reducing(Exception):
    """It pickles as something else."""

    def __reduce__(self):
        return str, (str(self),)


class _FailingWith(FieldShuffler):
    failure: Exception

    def get_workloads(self, batch):
        if dist.get_rank() == 1:
            raise self.failure
        return super().get_workloads(batch)


@on_ranks(2)
def test_all_ranks_raise_an_error_of_one_kind():
    for failure in (
        CorruptShard("a.parquet", 7),
        Unreadable("b.parquet"),
        FileNotFoundError(2, "no such file", "c.parquet"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        KeyError("d"),
        json.JSONDecodeError("no value", "{", 1),  # pickles without what was added to it
        BadRecord(3),
        Reducing("e"),
    ):
        shuffler = _FailingWith()
        shuffler.failure = failure
        with pytest.raises(type(failure)) as raised:
            shuffler.plan(lopsided_batch())
        assert type(raised.value) is type(failure) and str(raised.value) == str(failure)
        assert getattr(raised.value, "row", None) == getattr(failure, "row", None)
        assert (raised.value is failure) == (dist.get_rank() == 1)
        assert (raised_on(raised.value) is None) == (dist.get_rank() == 1)


@on_ranks(2)
def test_an_error_of_a_type_that_others_cannot_import_keeps_its_text_and_its_rank():
    shuffler = _FailingWith()
    if dist.get_rank() == 1:
        module = ModuleType("of_rank_1_alone")
        module.ReadError = type("ReadError", (Exception,), {"__module__": module.__name__})
        sys.modules[module.__name__] = module
        shuffler.failure = module.ReadError("shard 17 is damaged")
    error = error_of(shuffler.plan, lopsided_batch())
    assert error.startswith(
        f"{'ReadError' if dist.get_rank() else 'RuntimeError: ReadError'}: shard 17 is damaged"
    )
    assert ("raised on rank 1:" in error) == (dist.get_rank() == 0)


def _leave_while_the_others_gather() -> None:
    channel = RankGroup.of().channel()
    if dist.get_rank() == 1:
        os._exit(1)
    channel.all_gather(np.zeros(1))


def test_a_lost_connection_says_that_another_rank_shows_the_cause():
    pool = ProcessPool(2)
    with pytest.raises(RankError) as raised:
        pool.run(_leave_while_the_others_gather)
    waiting, left = raised.value.by_rank
    assert left == "the process died"
    assert "rank 0 ends, because it lost the connection to another rank: that rank's traceback" in waiting
