"""The harness of all benchmarks: names, clocks, alternating runs, statistics, processes, and results.

A benchmark is a module with a function `measure`, which returns its figures, and a function `tables`, which
returns the Markdown between the markers of pages. `python -m benchmarks NAME` runs it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from commons.distributed import BalanceReport

Record = dict[str, Any]
T = TypeVar("T")

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
# Modules by the names that `make bench NAME=…` accepts. The last part of a module's name also names its file
# in `RESULTS`. The Makefile describes each benchmark in one line.
BENCHMARKS = {
    "attention": "attention",
    "checkpoint": "checkpoint_stall",
    "exchange-kernels": "exchange_kernels",
    "first-plan": "first_plan",
    "getting-started": "getting_started",
    "gather": "plan_gather",
    "groups": "partition.groups",
    "kuairand": "kuairand_preprocess",
    "loading": "bucket_loading",
    "micro-batch": "micro_batch",
    "movielens": "movielens_equivalence",
    "padded": "padded",
    "partition": "partition.partition",
    "pieces": "pieces",
    "plans": "partition.plans_at_size",
    "public-data": "public_data",
    "retrieval": "retrieval_quality",
    "shuffle": "shuffle",
}
_RESAMPLES = 2000


def machine() -> Record:
    """Returns the properties of this machine that readers need."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return {
        "cpu": _read_cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: installed[name] for name in ("torch", "numpy", "numba") if name in installed},
    }


def show_progress(items: Iterable[T], what: str) -> Iterable[T]:
    """Yields the items, with a progress bar titled `what` on rank 0's stderr, or no bar if `what` is ""."""
    from tqdm import tqdm  # the GPU check may run without it

    return tqdm(items, desc=what, disable=not what or os.environ.get("RANK", "0") != "0")


def list_cases(**values: Iterable[Any]) -> list[Record]:
    """Returns all combinations of the named values. The values of the last name vary fastest."""
    return [dict(zip(values, case, strict=True)) for case in product(*values.values())]


def measure_cases(cases: Sequence[Record], measure: Callable[..., Record], what: str) -> list[Record]:
    """Returns a record for each case: its values, and the figures that `measure` returns for them."""
    return [{**case, **measure(**case)} for case in show_progress(cases, what)]


def time_call(call: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[T, float]:
    """Returns the result of a call, and the call's time in milliseconds."""
    start = clock()
    result = call()
    return result, (clock() - start) * 1e3


def time_ms(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the time of a call in milliseconds."""
    return time_call(call, clock)[1]


def take_turns(arms: Collection[T], rounds: int, what: str = "") -> Iterator[T]:
    """Yields all arms in each round. Each round starts with another arm, so a drift in speed favors none."""
    order = list(arms)
    for _ in show_progress(range(rounds), what):
        yield from order
        order.append(order.pop(0))


def time_in_turns(
    calls: Mapping[Any, Callable[..., object]],
    rounds: int,
    inputs: Sequence[tuple[Any, ...]] = ((),),
    clock: Callable[[], float] = time.process_time,
    before_each: Callable[[], object] = lambda: None,
) -> dict[Any, list[float]]:
    """Returns each call's milliseconds, by name. Calls alternate on the same inputs.

    Args:
        calls: functions by name. Each is first called once untimed, to compile and to warm up.
        rounds: number of times that every input is timed.
        inputs: arguments of the calls.
        clock: clock in seconds. The default is the CPU time of this process.
        before_each: function that runs before each timed call, such as a barrier.
    """
    for call in calls.values():
        call(*inputs[0])
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for turn, name in enumerate(take_turns(calls, rounds * len(inputs))):
        before_each()
        given = inputs[turn // len(calls) % len(inputs)]
        times[name].append(time_ms(partial(calls[name], *given), clock))
    return times


def find_percentiles(times: Sequence[float]) -> Record:
    """Returns the number of times, their median, and their 99th percentile."""
    median, p99 = np.percentile(times, [50, 99]).round(4).tolist()
    return {"calls": len(times), "median": median, "p99": p99}


def summarize(values: Sequence[float], digits: int = 3) -> Record:
    """Returns the median, the minimum, and the maximum."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def average(records: Sequence[Record], digits: int = 5) -> Record:
    """Returns the mean of each figure over records that have the same keys."""
    return {key: round(float(np.mean([each[key] for each in records])), digits) for key in records[0]}


class Arm:
    """One of several training runs that are compared.

    Args:
        pipeline: training pipeline with a model of its own.
        batches: batches that it trains on.

    Attributes:
        losses: mean loss of each step over all ranks, warm-up included.
        block_seconds: seconds per step of each timed block.
        reports: reports of all steps in timed blocks.
    """

    def __init__(self, pipeline: Any, batches: Iterable[Any]) -> None:
        self.pipeline, self._batches = pipeline, iter(batches)
        self.losses: list[float] = []
        self.block_seconds: list[float] = []
        self.reports: list[BalanceReport] = []

    def run(self, steps: int, timed: bool = True) -> None:
        """Trains for `steps` steps, and measures the time between barriers before and after them."""
        sums, tokens, reports = [], [], []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.pipeline.progress(self._batches)
            sums.append(self.pipeline.loss_sum)
            tokens.append(self.pipeline.loss_tokens)
            reports.append(self.pipeline.report)
        dist.barrier()
        seconds = time.perf_counter() - start
        totals = torch.stack(sums).double()
        dist.all_reduce(totals)
        self.losses += (totals.cpu() / torch.tensor(tokens)).tolist()
        if timed:
            self.block_seconds.append(seconds / steps)
            self.reports += reports

    def difference_of_losses(self, base: Arm) -> float:
        """Returns the largest relative difference of a step's loss from that of `base`."""
        losses = np.array([base.losses, self.losses])
        return float((np.abs(losses[0] - losses[1]) / losses[0]).max())


def train_in_turn(
    arms: Iterable[Arm], blocks: int, what: str = "", steps_per_block: int = 1, warm_up_steps: int = 2
) -> None:
    """Warms up arms that are new, then trains all arms in turn, for `blocks` timed blocks each."""
    arms = list(arms)
    for arm in arms:
        if not arm.losses:
            arm.run(warm_up_steps, timed=False)
    for arm in take_turns(arms, blocks, what):
        arm.run(steps_per_block)


def compare_times(before: Arm, after: Arm) -> Record:
    """Returns the speedup over all timed blocks, with its bootstrapped 95% confidence interval."""
    seconds = np.array([before.block_seconds, after.block_seconds])
    draws = np.random.default_rng(0).integers(0, seconds.shape[1], (_RESAMPLES, seconds.shape[1]))
    sums = seconds[:, draws].sum(-1)
    return {
        "speedup": float(np.divide(*seconds.sum(1))),
        "speedup_interval": np.percentile(sums[0] / sums[1], [2.5, 97.5]).round(4).tolist(),
    }


def measure_step_memory(step: Callable[[], object]) -> int:
    """Returns the peak bytes that torch allocates on the CPU in a step, beyond those before it."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        step()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(changes), default=0)


def run_torchrun(
    num_ranks: int, module: str, *arguments: str | Path, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `torchrun --nproc_per_node NUM_RANKS -m MODULE ARGUMENTS`, one thread per rank.

    Raises:
        subprocess.CalledProcessError: the run fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["-m", module, *map(str, arguments)]
    return subprocess.run(command, check=True, env=environment, cwd=REPOSITORY, stdout=stdout, text=True)


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: str | Path) -> Any:
    """Calls a function of a module on new ranks of this machine, and returns its result on rank 0.

    Args:
        num_ranks: number of processes, of one thread each.
        function: callable of the rank's device and `arguments` as strings. Its result must fit into JSON.
        arguments: further arguments of the function.
    """
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        name = f"{function.__module__}:{function.__name__}"
        run_torchrun(num_ranks, __name__, name, result, *arguments)
        return json.loads(result.read_text())


def start_forks(count: int, function: Callable[..., None], *arguments: Any) -> list[Any]:
    """Starts forks of this process, which share its imports. Each calls `function(rank, *arguments)`."""
    context = multiprocessing.get_context("fork")
    forks = [context.Process(target=function, args=(rank, *arguments), daemon=True) for rank in range(count)]
    for fork in forks:
        fork.start()
    return forks


def name_result(name: str) -> str:
    """Returns the name of a benchmark's result, for `read_result` and `write_result`."""
    return BENCHMARKS[name].rpartition(".")[2]


def read_result(name: str) -> Any:
    """Returns the figures of `results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def write_result(name: str, figures: Record) -> None:
    """Writes `results/NAME.json`, with one line per innermost record, so that a diff shows which changed."""
    text = json.dumps(figures, indent=1)
    innermost = re.compile(r"[\[{][^\[\]{}]*[\]}]")
    text = innermost.sub(lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def _read_cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _run_rank(function: str, result: Path, arguments: Sequence[str]) -> None:
    """Runs one rank of `run_on_ranks`."""
    from commons.training import rank_process

    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    with rank_process() as device:
        figures = call(device, *arguments)
        if os.environ["RANK"] == "0":
            result.write_text(json.dumps(figures))


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harness", description="A rank of `run_on_ranks`, under torchrun."
    )
    parser.add_argument("function", help="MODULE:FUNCTION")
    parser.add_argument("result", type=Path)
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    import commons.quiet_logs  # noqa: F401  before torchrec
    from commons.training import run_rank

    run_rank(partial(_run_rank, given.function, given.result, given.arguments))


if __name__ == "__main__":
    _main()
