"""The figures of a run, in JSON lines, in TensorBoard and in a line of text."""

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commons.balance_meter import figures_of_rank, window_figures
from commons.distributed import BalanceReport
from tests.commons.training.internals import RunRecord, interval_figures, text_of
from tests.commons.training.small_task import lines_in, small_run


def _report(before: list[float], after: list[float]) -> BalanceReport:
    return BalanceReport(
        loads_before=np.array(before),
        loads_after=np.array(after),
        job_loads_before=np.array(before),
        job_loads_after=np.array(after),
        tokens_before=np.array(before, dtype=np.int64) // 10,
        tokens_after=np.array(after, dtype=np.int64) // 10,
        counts_after=np.stack([[7, 5], after, [50, 90]], 1),
        samples_moved=1,
        bytes_moved=10,
        bytes_loaded=100,
        workloads=np.array(after),
        job_total_load=float(sum(after)),
        unit="FLOPs",
        equal_rows=True,
    )


SUMS = {
    "loss": (60.0, 40.0),
    "forward_flops": (1e12, 3e12),
    "bytes_sent": (10, 30),
    "bytes_received": (30, 10),
    "load_seconds": (0.0, 0.8),
    "plan_wait_seconds": (0.2, 0.6),
    "exchange_seconds": (0.4, 0.0),
    "samples_cut": (0, 0),
    "pieces": (0, 0),
    "bytes_fetched": (0, 0),
    "fetch_seconds": (0.0, 0.0),
    "peak_memory_bytes": (5e6, 7e6),
    "compute_seconds": ([0.5, 1.0], [1.5, 0.8]),
}
REPORTS = [_report([100, 300], [200, 200]), _report([500, 100], [300, 300])]
INTERVAL = {
    "seconds": 4.0,
    "loss_tokens": 200,
    "reports": REPORTS,
    "of_ranks": [
        {name: values[rank] for name, values in SUMS.items()} | figures_of_rank(REPORTS, rank)
        for rank in range(2)
    ],
}
OF_METER = window_figures(**INTERVAL) | {
    name: list(SUMS[name]) for name in ("forward_flops", "peak_memory_bytes")
}


def test_figures_add_up_over_ranks_and_steps():
    figures = interval_figures(OF_METER, peak_flops=3e12)
    expected = {
        "loss": 0.5,
        "seconds_per_step": 2.0,
        "samples_per_second": (7 + 5) * 2 / 4,
        "tokens_per_second": (40 + 60) / 4,
        "tflops": 3 * 4 / 4,  # a forward and two backwards
        "mfu": 3e12 / (2 * 3e12),
        "slowest_rank": 0,
        "slowest_share": 0.5,
        "slowest_ms": 1250.0,
        "imbalance_before": (300 + 500) / (200 + 300),
        "imbalance_after": 1.0,
        "imbalance_measured": (1.5 + 1.0) / (1.0 + 0.9),
        "token_imbalance_before": (30 + 50) / (20 + 30),
        "token_imbalance_after": 1.0,
        "micro_batches": 1.0,
        "plan_wait_ms": 200.0,
        "exchange_ms": 100.0,
        "other_ms": 1e3 * (4 - 2.5) / 2,
        "bytes_sent": 10.0,
        "bytes_received": 10.0,
        "compute_ms": [750.0, 1150.0],
        "load_ms": [0.0, 400.0],
        "waiting_ms": [500.0, 100.0],
        "tokens_before": [30.0, 20.0],
        "tokens_after": [25.0, 25.0],
        "loads_after": [250.0, 250.0],
        "unit": "FLOPs",
        "samples_after": [7.0, 5.0],
        "peak_memory_mb": [5.0, 7.0],
    }
    assert figures.pop("counts_after") == [[7.0, 250.0, 50.0], [5.0, 250.0, 90.0]]
    assert not any(figures.pop(name) for name in ("samples_cut", "pieces", "fetch_ms", "bytes_fetched"))
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value), name
    # A rank's step is its computation, its wait for the slowest rank, and the rest.
    assert 750 + 500 + figures["other_ms"] == pytest.approx(1e3 * figures["seconds_per_step"])


def test_the_line_has_utilization_only_where_the_peak_is_known():
    assert "3 TFLOP/s (50.0% MFU)" in text_of(7, interval_figures(OF_METER, peak_flops=3e12))
    line = text_of(7, interval_figures(OF_METER, peak_flops=None))
    assert "MFU" not in line and "imbalance 1.600 -> 1.000 in FLOPs, measured 1.316" in line
    assert "tokens 1.60 -> 1.00" in line


def _events(log_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(log_dir / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_has_what_the_json_lines_have(pools, tmp_path):
    settings = {"max_train_iters": 4, "log_interval": 2, "peak_tflops": 0.1}
    pools(2).run(partial(small_run, str(tmp_path), enable_balanced_shuffler=True, **settings))
    events = _events(tmp_path)
    (start,), lines, (evaluation,) = (lines_in(tmp_path, kind) for kind in ("start", "train", "eval"))
    assert start["settings"]["peak_tflops"] == 0.1 and evaluation["step"] == 4
    assert [line["step"] for line in lines] == [2, 4]
    for line in (*lines, evaluation):
        kind, step = line.pop("kind"), line.pop("step")
        for alone in {"unit", "counts_after"} & line.keys():  # no scalars
            del line[alone]
        for name, value in line.items():
            expected = {name: value}
            if isinstance(value, list):
                assert len(value) == 2
                expected = {f"{name}/largest": max(value), f"{name}/mean": sum(value) / 2}
            for tag, number in expected.items():
                shown = {event.step: event.value for event in events.Scalars(f"{kind}/{tag}")}
                assert shown[step] == pytest.approx(number)
    figures = lines[0]
    assert 0 < figures["mfu"] == pytest.approx(figures["tflops"] / 0.2)
    assert min(figures["compute_ms"]) > 0 <= min(figures["waiting_ms"]) and min(figures["peak_memory_mb"]) > 1


def _write(folder: str, first_step: int, losses: list[float]) -> None:
    with RunRecord(Path(folder), 9, first_step) as record:
        for step, loss in enumerate(losses, first_step + 1):
            record.write("train", step, {"loss": loss})


def test_steps_computed_again_replace_the_earlier_ones_in_tensorboard(pools, tmp_path):
    pools(2).run(_write, str(tmp_path), 0, [1.0, 2.0, 3.0, 4.0])
    time.sleep(1)  # TensorBoard orders files by second, and those of one second by the text of a count
    pools(2).run(_write, str(tmp_path), 2, [30.0, float("nan")])
    shown = [(event.step, event.value) for event in _events(tmp_path).Scalars("train/loss")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert (tmp_path / "train.jsonl").read_text().splitlines()[-1] == (
        '{"kind": "train", "step": 4, "loss": null}'
    )
