"""A trace shows every stage by name, and the plan of a step beside the computing of one before it."""

from __future__ import annotations

import gzip
import json
import re
from functools import partial
from pathlib import Path

import pytest

from commons.training import TrainerArgs
from tests.commons.training.test_recovery import _train

# By what TorchRec's pipelines call them; these number most.
NAMES = (
    "load batch",
    "plan",
    "plan: workloads",
    "plan: gather",
    "plan: placement",
    "wait for plan",
    "copy_batch_to_gpu",
    "exchange",
    "forward",
    "backward",
    "optimizer",
)
INPUT_DISTRIBUTION = ("start_sparse_data_dist", "wait_sparse_data_dist")


class Trace:
    """Of one rank; each range is `(start, end, thread)`, in microseconds."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") as file:
            self._events = json.load(file)["traceEvents"]

    def ranges(self, name: str) -> list[tuple[float, float, int]]:
        pattern = re.compile(rf"## {re.escape(name)}( \d+)? ##")
        return sorted(
            (event["ts"], event["ts"] + event["dur"], event["tid"])
            for event in self._events
            if event["ph"] == "X" and pattern.fullmatch(event["name"])
        )

    def steps(self) -> list[str]:
        names = [event["name"] for event in self._events if event["ph"] == "X"]
        return sorted(name for name in names if name.startswith("ProfilerStep"))

    def thread_name(self, thread: int) -> str:
        return next(
            event["args"]["name"]
            for event in self._events
            if event["ph"] == "M" and event["name"] == "thread_name" and event["tid"] == thread
        )


def _traces(pools, folder: Path, num_steps: int, **settings) -> list[Trace]:
    pools(2).run(partial(_train, str(folder), num_steps, profile=True, **settings))
    files = sorted((folder / "traces").iterdir())
    assert [file.name for file in files] == ["rank0.json.gz", "rank1.json.gz"]
    return [Trace(file) for file in files]


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_type": "none"},
        {"pipeline_type": "native", "max_tokens_per_micro_batch": 30},
    ],
    ids=["none", "native, micro-batches"],
)
def test_a_trace_names_all_stages_and_shows_the_plan_beside_the_training(pools, tmp_path, settings):
    for trace in _traces(pools, tmp_path, 3, profile_step_start=1, profile_step_end=3, **settings):
        assert trace.steps() == ["ProfilerStep#1", "ProfilerStep#2"]
        native = settings["pipeline_type"] == "native"
        for name in NAMES + (INPUT_DISTRIBUTION if native else ()):
            assert trace.ranges(name), name
        plans, forwards, backwards = (trace.ranges(name) for name in ("plan", "forward", "backward"))
        (training_thread,) = {thread for _, _, thread in forwards}
        (planning_thread,) = {thread for _, _, thread in plans}
        assert planning_thread != training_thread and "plan ahead" in trace.thread_name(planning_thread)
        assert {thread for _, _, thread in trace.ranges("wait for plan")} == {training_thread}
        # Traced from the first step on, so that the plan with a number is of the step with that number.
        assert any(plan[0] < forward[1] for plan, forward in zip(plans[1:], forwards, strict=False)), (
            "no step was planned before the one before it was computed"
        )
        within = [b for b in backwards if any(f[0] < b[0] and b[1] < f[1] for f in forwards)]
        assert bool(within) == ("max_tokens_per_micro_batch" in settings)
        # All of it on one clock: what waits for a plan has it when, and not before, the plan is made.
        for (_, plan_end, _), (_, wait_end, _) in zip(plans, trace.ranges("wait for plan"), strict=False):
            assert plan_end < wait_end + 1e3


def test_a_run_that_goes_on_or_ends_within_the_range_traces_its_part_of_it(pools, tmp_path):
    settings = {"profile_step_start": 2, "profile_step_end": 5, "pipeline_type": "none"}
    settings |= {"ckpt_save_interval": 2, "ckpt_save_dir": str(tmp_path / "checkpoints")}
    for trace in _traces(pools, tmp_path, 2, **settings):
        assert trace.steps() == ["ProfilerStep#2"]
    for trace in _traces(pools, tmp_path, 5, **settings):
        assert trace.steps() == ["ProfilerStep#3", "ProfilerStep#4"]
        assert len(trace.ranges("evaluation")) == 1  # behind step 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profile_step_start": 0}, "profile_step_start = 0: expected an integer of at least 1"),
        (
            {"profile_step_start": 5, "profile_step_end": 5},
            "profile_step_end = 5: expected an integer above profile_step_start = 5",
        ),
    ],
)
def test_steps_that_are_none(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainerArgs(4, **settings)
