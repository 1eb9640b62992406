"""Names that `commons.extensions.pieces` does not export: the one place where tests know its files."""

from commons.extensions.pieces.cut_batch import check_cut, cut_rows
from commons.extensions.pieces.cut_rules import PIECE, own_spans, spans
from commons.extensions.pieces.cut_search import cut_and_place
from commons.extensions.pieces.cutting import MIN_TOKENS, Cutting
from commons.extensions.pieces.key_fetch import InFlight, KeyFetch
