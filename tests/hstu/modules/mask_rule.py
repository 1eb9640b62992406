"""The attention mask, as a rule for each pair of tokens."""

from hstu.modules import SampleMask


def sees(mask: SampleMask, row: int, column: int) -> bool:
    """Returns whether a row sees a column, by the rule for each pair of tokens."""
    if column >= mask.history_end:
        if row < mask.history_end:
            return False
        candidate_of = [(token - mask.history_end) // mask.tokens_per_candidate for token in (row, column)]
        return candidate_of[0] == candidate_of[1] and column <= row
    if row >= mask.history_end or not mask.is_causal:
        return True
    return column <= row or (row < mask.num_contextual and column < mask.num_contextual)
