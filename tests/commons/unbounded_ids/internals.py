"""Names that `commons.unbounded_ids` does not export: the one place where tests know its files."""

from commons.unbounded_ids.id_mix import MARK_OF_FREE_ROW, fresh_rows, mixed, owners, unmixed
