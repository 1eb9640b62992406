"""Predicts what balancing would gain on given sequence lengths, before anyone switches it on."""


class InputError(ValueError):
    """Wrong input, in one line: the value, what was expected, and how to fix it."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))
