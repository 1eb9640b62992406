"""Names that `commons.extensions.learned_costs` does not export: the one place where tests know its files."""

from commons.extensions.learned_costs.calibrate import WARM_UP_STEPS, MeasuredSteps, main, summary
from commons.extensions.learned_costs.cost_and_speeds import (
    LEAST_TIMES,
    MOST_CHANGE,
    followed_speed,
    follows_workloads,
    refitted,
    speeds_then,
)
from commons.extensions.learned_costs.fitting import LINEAR, fit_cost, fitted, is_linear, median_error
from commons.extensions.learned_costs.learned_costs import SPEED_LIMIT
