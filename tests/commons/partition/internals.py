"""Names that `commons.partition` does not export: the one place where tests know its files."""

from commons.partition.imbalance import loads
from commons.partition.problem import Problem
from commons.partition.refined import refine
