"""Names that `commons.advisor` does not export: the one place where tests know its files."""

from commons.advisor.__main__ import main
from commons.advisor.command_line import parser
