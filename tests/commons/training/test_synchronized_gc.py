"""Garbage is collected after the same steps on all ranks, and as before once training has ended."""

import gc
from itertools import count

import pytest

from commons.pipeline import SparseDistTrainPipeline
from tests.commons.training.internals import SynchronizedGC
from tests.commons.training.small_task import small_run
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("enabled", [True, False])
def test_python_collects_as_before_once_training_has_failed(enabled):
    gc.unfreeze()  # what was imported before the tests
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError), SynchronizedGC(2):
            assert not gc.isenabled() and gc.get_freeze_count()
            raise RuntimeError
        assert gc.isenabled() == enabled and not gc.get_freeze_count()
        with SynchronizedGC(None) as collector:  # without an interval, Python collects when it sees fit
            collector.after_step()
            assert gc.isenabled() == enabled and not gc.get_freeze_count()
        gc.freeze()  # what a program froze stays frozen
        with SynchronizedGC(2):
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
        gc.enable()


@on_ranks(2)
def test_all_ranks_collect_after_the_same_batches(tmp_path):
    original, numbers, computed, found = SparseDistTrainPipeline.progress, count(1), 0, []

    def progress(pipeline, loader):
        nonlocal computed
        output = original(pipeline, loader)
        computed = next(numbers)
        return output

    def note(phase, info):
        if phase == "start" and not gc.isenabled() and computed:
            found.append(computed)

    SparseDistTrainPipeline.progress = progress
    gc.callbacks.append(note)
    try:
        small_run(str(tmp_path), max_train_iters=5, eval_interval=3, max_eval_iters=2, gc_interval=2)
    finally:
        gc.callbacks.remove(note)
        SparseDistTrainPipeline.progress = original
    assert found == [2, 4, 6, 8]  # three of training, two of an evaluation, and again two of each
