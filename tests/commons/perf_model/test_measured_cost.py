from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.perf_model import MeasuredCost
from commons.perf_model.calibrate import WARM_UP_STEPS, MeasuredSteps, main

COST = MeasuredCost(2e-3, 1e-4, 1e-6, 2e-9)


def _steps(cost: MeasuredCost, num_steps: int, seed: int = 0) -> MeasuredSteps:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_steps):
        tokens = rng.lognormal(5, 1.2, rng.integers(4, 40)).round()
        facts = (len(tokens), tokens.sum(), np.square(tokens).sum())
        rows.append((*facts, np.square(tokens).sum(), float(cost.step_seconds(*map(np.float64, facts)))))
    return MeasuredSteps.of(rows)


seconds = st.floats(0, 1, allow_nan=False)


@settings(deadline=None, max_examples=30)
@given(st.tuples(seconds, seconds, seconds, seconds).filter(lambda parts: sum(parts[1:]) > 1e-3))
def test_a_fit_to_what_a_curve_predicts_predicts_the_same(parts):
    steps = _steps(MeasuredCost(*parts), 60)
    cost = steps.fit()
    assert float(steps.errors(cost).max()) < 1e-6 and cost.median_error < 1e-6
    others = _steps(MeasuredCost(*parts), 60, seed=1)
    assert float(others.errors(cost).max()) < 1e-4


def test_steps_that_something_else_slowed_do_not_bend_the_fit():
    steps = _steps(COST, 200)
    seconds = steps.seconds * np.random.default_rng(0).lognormal(0, 0.03, 200)
    seconds[::10] *= 5
    cost = MeasuredCost.fit(steps.samples, steps.tokens, steps.squared_tokens, seconds)
    assert float(np.median(steps.errors(cost))) < 0.02


@pytest.mark.parametrize("per_step, per_sample", [(0.02, 0.0), (0.0, 0.02 / 16), (0.01, 0.01 / 16)])
def test_what_steps_of_as_many_samples_take_anyway_is_the_steps(per_step, per_sample):
    rng = np.random.default_rng(0)
    tokens = rng.lognormal(5, 1.2, (200, 16)).round()
    samples, sums = np.full(200, 16.0), (tokens.sum(1), np.square(tokens).sum(1))
    true = MeasuredCost(per_step, per_sample, 1e-6, 2e-9)
    seconds = true.step_seconds(samples, *sums) * rng.lognormal(0, 0.03, 200)
    cost = MeasuredCost.fit(samples, *sums, seconds)
    assert cost.per_sample == 0 and cost.per_step == pytest.approx(0.02, rel=0.05)


def test_a_line_that_has_the_first_steps_in_it_is_left_out(tmp_path):
    steps = _steps(COST, 30)
    lines = [line for line in _log_lines(steps) if json.loads(line)["step"] % 3 == 0]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    # Each line is of three steps; that at step 6 has the fourth and the fifth in it.
    assert len(MeasuredSteps.read(tmp_path / "train.jsonl").seconds) == 8


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_samples_cost_whole_nanoseconds(kind):
    cost = COST.per_sample_ns(kind([0, 1, 1000]))
    assert type(cost) is type(kind([0]))
    assert cost.tolist() == [100_000, 101_000 + 2, 100_000 + 1_000_000 + 2_000_000]
    assert "int64" in str(cost.dtype)


def test_written_and_read_it_is_the_same(tmp_path):
    path = tmp_path / "made" / "cost.json"
    COST.save(path)
    assert MeasuredCost.load(path) == COST


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"kind": "other"}', '{"kind": "measured cost", "per_step": -1}']
)
def test_another_file_is_named(tmp_path, content):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"cost\.json is not a measured cost written by a calibration"):
        MeasuredCost.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.json does not exist"):
        MeasuredCost.load(tmp_path / "none.json")


def test_times_that_no_sample_changes_are_no_cost():
    samples = np.array([4.0, 4.0, 4.0, 4.0, 8.0])
    with pytest.raises(
        ValueError, match=r"in 5 steps the time of one, near 2 ms, does not grow with its samp"
    ):
        MeasuredCost.fit(samples, 10 * samples, 100 * samples, np.full(5, 0.002))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((0.0, -1.0, 0.0, 1.0), "per_sample is -1.0; expected a finite number of at least 0"),
        ((float("nan"), 1.0, 1.0, 1.0), "per_step is nan"),
        ((1.0, 0.0, 0.0, 0.0), "no sample costs anything"),
    ],
)
def test_a_cost_that_cannot_be_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        MeasuredCost(*parts)


def _log_lines(steps: MeasuredSteps) -> list[str]:
    """A log of one rank, some lines of which are not about training."""
    lines = [json.dumps({"kind": "start", "step": 0})]
    for step in range(len(steps.samples)):
        figures = {
            "samples_after": [steps.samples[step]],
            "tokens_after": [steps.tokens[step]],
            "squared_tokens_after": [steps.squared_tokens[step]],
            "loads_after": [steps.loads[step]],
            # What comes first has one-off costs in it.
            "compute_ms": [steps.seconds[step] * 1e3 * (50 if step < WARM_UP_STEPS else 1)],
        }
        lines.append(json.dumps({"kind": "train", "step": step + 1, **figures}))
    return lines


def test_logged_steps_are_fitted(tmp_path, capsys):
    log, out = tmp_path / "train.jsonl", tmp_path / "cost.json"
    log.write_text("\n".join(_log_lines(_steps(COST, 60))))
    main([str(out), str(log)])
    assert float(_steps(COST, 60).errors(MeasuredCost.load(out)).max()) < 1e-6
    assert "2 ns · T²" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 measured steps; expected at least 4"),
        ("no json", "line 1: not a line of a training log"),
        (
            '{"kind": "train", "step": 9}\n{"kind": "train", "step": 10}',
            "line 2: not a line of a training log",
        ),
    ],
)
def test_a_log_that_cannot_be_fitted_is_an_error_of_one_line(tmp_path, capsys, text, message):
    log = tmp_path / "train.jsonl"
    log.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path / "cost.json"), str(log)])
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and message in error and error.count("\n") == 1
