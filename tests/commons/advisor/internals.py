"""Names that `commons.advisor` does not export: the one place where tests know its files."""

from commons.advisor.__main__ import main
from commons.advisor.command_line import parser
from commons.advisor.files import read_lengths
from commons.advisor.pieces import PieceCosts, bytes_of_rows, pieces_of
from commons.advisor.prediction import DrawnSteps, draw_steps
from commons.advisor.public_data import ASSUMED_SPREAD, PUBLIC_DATA
from commons.advisor.strategies import strategies
