"""Garbage is collected after the same steps on all ranks, and as before once training has ended."""

import gc
from functools import partial
from itertools import count

import pytest

from commons.pipeline.train_pipelines import SparseDistTrainPipeline
from commons.training.synchronized_gc import SynchronizedGC
from tests.commons.training.small_task import small_run


@pytest.mark.parametrize("enabled", [True, False])
def test_python_collects_as_before_once_training_has_failed(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError), SynchronizedGC(2):
            assert not gc.isenabled() and gc.get_freeze_count()
            raise RuntimeError
        assert gc.isenabled() == enabled and not gc.get_freeze_count()
    finally:
        gc.enable()


def test_without_an_interval_python_collects_when_it_sees_fit():
    with SynchronizedGC(None) as collector:
        collector.after_step()
        assert gc.isenabled() and not gc.get_freeze_count()


def _collections(log_dir: str) -> list[int]:
    """The batches that a training and its evaluations had computed at each collection."""
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
        small_run(log_dir, max_train_iters=5, eval_interval=3, max_eval_iters=2, gc_interval=2)
    finally:
        gc.callbacks.remove(note)
        SparseDistTrainPipeline.progress = original
    return found


def test_all_ranks_collect_after_the_same_batches(pools, tmp_path):
    # Three of training, two of an evaluation, and again two of each.
    assert pools(2).run(partial(_collections, str(tmp_path))) == [[2, 4, 6, 8]] * 2
