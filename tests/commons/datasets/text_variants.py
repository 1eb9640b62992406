"""Text files as people have them, which any reader reads as the same text."""

from collections.abc import Callable

Change = Callable[[bytes], bytes]


def unchanged(text: bytes) -> bytes:
    return text


def replaced(old: str, new: str) -> Change:
    """Returns a function that replaces text in a file."""
    return lambda text: text.replace(old.encode(), new.encode("latin-1"))


def with_fields(change: Callable[[list[str]], list[str]]) -> Change:
    """Returns a function that changes the fields of each line of a CSV file."""
    return lambda text: "".join(
        ",".join(change(line.split(","))) + "\n" for line in text.decode().splitlines()
    ).encode("latin-1")


SAME_TEXT: dict[str, Change] = {
    "as it is": unchanged,
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "no newline at the end": lambda text: text.removesuffix(b"\n"),
    "blank last lines": lambda text: text + b"\r\n\n",
}
