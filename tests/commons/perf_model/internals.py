"""Names that `commons.perf_model` does not export: the one place where tests know its files."""

from commons.perf_model.compute_clock import ComputeClock, ComputeSpan
from commons.perf_model.cost import sum_counts
from commons.perf_model.token_counts import ATTENTION_TILE
