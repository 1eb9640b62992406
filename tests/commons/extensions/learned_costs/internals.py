"""Names that `commons.extensions.learned_costs` does not export: the one place where tests know its files."""

from commons.extensions.learned_costs.learned_costs import SPEED_LIMIT
