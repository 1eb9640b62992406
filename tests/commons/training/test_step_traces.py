"""A trace shows every stage by name, and the plan of a step alongside an earlier step's computation."""

import gzip
import json
import re
from functools import partial
from pathlib import Path

from tests.commons.training.small_task import small_run

# The names that TorchRec's pipelines give them; they number most.
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
    """The trace of one rank. Ranges are `(start, end, thread)`, in microseconds."""

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

    def ranges_of_training(self, name: str) -> list[tuple[float, float, int]]:
        """Those outside of the evaluation, of which there is one: after step 2, or after step 3."""
        ((start, end, _),) = self.ranges("evaluation")
        return [found for found in self.ranges(name) if found[1] < start or end < found[0]]

    def steps(self) -> list[str]:
        names = [event["name"] for event in self._events if event["ph"] == "X"]
        return sorted(name for name in names if name.startswith("ProfilerStep"))


# Ends in the middle of the traced steps, then goes on with them in another mode.
SETTINGS = {"profile": True, "profile_step_start": 1, "profile_step_end": 5, "ckpt_save_interval": 2}
RUNS = [
    (2, {"pipeline_type": "none"}, [1, 2]),
    (5, {"pipeline_type": "native", "max_tokens_per_micro_batch": 30}, [3, 4]),
]


def test_traces_name_all_stages_of_a_runs_part_and_show_the_plan_alongside_the_training(pools, tmp_path):
    for num_steps, mode, steps in RUNS:
        settings = {**SETTINGS, "ckpt_save_dir": str(tmp_path / "checkpoints"), "eval_interval": 3, **mode}
        run = partial(small_run, str(tmp_path), max_train_iters=num_steps, enable_balanced_shuffler=True)
        pools(2).run(partial(run, **settings))
        files = sorted((tmp_path / "traces").iterdir())
        assert [file.name for file in files] == ["rank0.json.gz", "rank1.json.gz"]
        for trace in map(Trace, files):
            assert trace.steps() == [f"ProfilerStep#{step}" for step in steps]
            _check_stages(trace, native=mode["pipeline_type"] == "native")


def _check_stages(trace: Trace, native: bool) -> None:
    for name in NAMES + (INPUT_DISTRIBUTION if native else ()):
        assert trace.ranges(name), name
    plans, waits, forwards, backwards = (
        trace.ranges_of_training(name) for name in ("plan", "wait for plan", "forward", "backward")
    )
    (training_thread,) = {thread for _, _, thread in forwards}
    (planning_thread,) = {thread for _, _, thread in plans}
    assert planning_thread != training_thread
    assert {thread for _, _, thread in waits} == {training_thread}
    # Traced from the run's first step on, so plans and forwards have the same numbers.
    assert any(plan[0] < forward[1] for plan, forward in zip(plans[1:], forwards, strict=False)), (
        "no step was planned before the one before it was computed"
    )
    within = [b for b in backwards if any(f[0] < b[0] and b[1] < f[1] for f in forwards)]
    assert bool(within) == native  # in micro-batches
    # All of it on one clock: a wait for a plan ends after the plan.
    for (_, plan_end, _), (_, wait_end, _) in zip(plans, waits, strict=False):
        assert plan_end < wait_end + 1e3
