"""Extensions that rely on samples that move are named together where none does."""

import pytest

from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.pieces import Pieces
from tests.commons.histories import TokenShuffler


def test_one_error_names_all_that_need_it():
    extensions = [LearnedCosts(), Pieces()]
    message = r"TokenShuffler\(enabled=False\) moves no samples, as LearnedCosts and Pieces would need"
    with pytest.raises(ValueError, match=message):
        TokenShuffler(enabled=False, extensions=extensions, equal_rows=False)
