"""Predicts the gain of balancing from sequence lengths, before anyone switches balancing on."""


class InputError(ValueError):
    """Wrong input. The message is one line: the value, the expected input, and how to fix it."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))
