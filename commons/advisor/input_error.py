"""What is wrong with what the user gave."""

from __future__ import annotations


class InputError(ValueError):
    """Names the value and says what was expected, in one line."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))
