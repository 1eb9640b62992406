"""Costs fitted to measured and to logged steps."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model import Cost
from tests.commons.extensions.learned_costs.internals import (
    LINEAR,
    WARM_UP_STEPS,
    MeasuredSteps,
    fit_cost,
    is_linear,
    main,
    summary,
)
from tests.few_examples import few_examples

# Of a sample, a token, and two columns, in nanoseconds.
COST = Cost((1e5, 1e3, 0.5, 2.0), per_step=2e6)


def _counts(num_steps: int, seed: int = 0, columns: int = 2) -> np.ndarray:
    """Sums over samples with a linear column, a quadratic one, or both; float64 `[steps, 2 + columns]`."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_steps):
        tokens = rng.lognormal(5, 1.2, rng.integers(4, 40)).round()
        of_columns = (5 * tokens, np.square(tokens))[2 - columns :]
        rows.append((len(tokens), tokens.sum(), *(column.sum() for column in of_columns)))
    return np.array(rows, dtype=np.float64)


def _steps(cost: Cost, num_steps: int, seed: int = 0) -> MeasuredSteps:
    counts = _counts(num_steps, seed, cost.num_columns)
    return MeasuredSteps(counts, cost.step_seconds(counts))


@few_examples
@given(st.tuples(*[st.floats(0, 1e9)] * 5).filter(lambda parts: sum(parts[:4]) > 1e6))
def test_a_fit_to_what_a_cost_predicts_predicts_the_same(parts):
    true = Cost(parts[:4], per_step=parts[4])
    steps = _steps(true, 60)
    cost = steps.fit()
    assert float(steps.errors(cost).max()) < 1e-6 and cost.median_error < 1e-6
    others = _steps(true, 60, seed=1)
    assert float(others.errors(cost).max()) < 1e-4


def test_steps_that_something_else_slowed_do_not_bend_the_fit():
    steps = _steps(COST, 200)
    slowed = steps.seconds * np.random.default_rng(0).lognormal(0, 0.03, 200)
    slowed[::10] *= 5
    cost = fit_cost(steps.counts, slowed)
    assert float(np.median(steps.errors(cost))) < 0.02


@pytest.mark.parametrize("per_step, per_sample", [(2e7, 0.0), (0.0, 2e7 / 16), (1e7, 1e7 / 16)])
def test_what_steps_of_as_many_samples_take_anyway_is_the_steps(per_step, per_sample):
    rng = np.random.default_rng(0)
    tokens = rng.lognormal(5, 1.2, (200, 16)).round()
    counts = np.stack([np.full(200, 16.0), tokens.sum(1), np.square(tokens).sum(1)], 1)
    true = Cost((per_sample, 1e3, 2.0), per_step)
    cost = fit_cost(counts, true.step_seconds(counts) * rng.lognormal(0, 0.03, 200))
    assert cost.coefficients[0] == 0 and cost.per_step == pytest.approx(2e7, rel=0.05)


def test_workloads_that_are_linear_in_tokens_are_told_from_others():
    counts = _counts(40)
    linear = counts[:, :3]
    affine = np.concatenate([linear, linear[:, :1] + 3 * linear[:, 1:2]], 1)
    same_length = counts * 0 + counts[:, :1] * counts[0]
    assert is_linear(linear) and is_linear(affine)
    assert not is_linear(counts) and not is_linear(counts[:, [0, 1, 3]]) and not is_linear(same_length)
    steps = MeasuredSteps(linear, linear @ [1e-4, 1e-6, 1e-6])
    assert LINEAR in summary(steps.fit(), steps)
    assert LINEAR not in summary(COST, _steps(COST, 40))


def test_times_that_do_not_grow_with_samples_are_refused():
    counts = np.array([4.0, 4.0, 4.0, 4.0, 8.0])[:, None] * [1, 10, 100]
    with pytest.raises(ValueError, match=r"in 5 steps .* 2 ms, does not grow with its samp"):
        fit_cost(counts, np.full(5, 0.002))


def _log_lines(steps: MeasuredSteps) -> list[str]:
    """A log of one rank, some lines of which are not about training."""
    lines = [json.dumps({"kind": "start", "step": 0})]
    for step, (counts, time) in enumerate(zip(steps.counts.tolist(), steps.seconds.tolist(), strict=True)):
        # What comes first has one-off costs in it.
        figures = {"counts_after": [counts], "compute_ms": [time * 1e3 * (50 if step < WARM_UP_STEPS else 1)]}
        lines.append(json.dumps({"kind": "train", "step": step + 1, **figures}))
    return lines


def test_logged_steps_are_fitted(tmp_path, capsys):
    log, out = tmp_path / "train.jsonl", tmp_path / "cost.json"
    log.write_text("\n".join(_log_lines(_steps(COST, 60))))
    main([str(out), str(log)])
    assert float(_steps(COST, 60).errors(Cost.load(out)).max()) < 1e-6
    assert "2 ns · w1" in capsys.readouterr().out
    # Lines of three steps each; that at step 6 has the fourth and the fifth in it, which are left out.
    log.write_text("\n".join(_log_lines(_steps(COST, 30))[::3]))
    assert len(MeasuredSteps.read(log)) == 8


def test_a_log_that_cannot_be_fitted_is_an_error_of_one_line(tmp_path, capsys):
    log, line = tmp_path / "train.jsonl", json.dumps({"kind": "train", "step": 10})
    for text, message in (
        ("", "0 measured steps; expected at least 4"),
        (f"{line}\n{line}", "line 2: not a line of a training log"),
    ):
        log.write_text(text)
        with pytest.raises(SystemExit) as exit_:
            main([str(tmp_path / "cost.json"), str(log)])
        error = capsys.readouterr().err
        assert exit_.value.code == 2 and message in error and error.count("\n") == 1
