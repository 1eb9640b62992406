"""Names that `commons.perf_model` does not export: the one place where tests know its files."""

from commons.perf_model.calibrate import WARM_UP_STEPS, MeasuredSteps, main, summary
from commons.perf_model.compute_clock import ComputeClock, ComputeSpan
from commons.perf_model.cost import LINEAR, is_linear, median_error, sum_counts
from commons.perf_model.learned_cost import (
    LEAST_TIMES,
    MOST_CHANGE,
    followed_speed,
    follows_workloads,
    refitted,
    speeds_then,
)
from commons.perf_model.nonnegative_fit import fitted
from commons.perf_model.token_counts import ATTENTION_TILE
