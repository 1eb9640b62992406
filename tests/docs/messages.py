"""Whether the code has the words of a message."""

from __future__ import annotations

import ast
import functools
import re

from tests.docs.pages import REPOSITORY

_PACKAGES = ("commons", "hstu", "sid_gr", "examples", "benchmarks")
# Words that a message must share with a string of the code, as a share of the message.
_LEAST_SHARE = 0.4
_LEAST_CHARACTERS = 16


def is_in_code(line: str) -> bool:
    """Whether a string of the code, whatever is filled into it, makes up most of the line."""
    line = " ".join(line.split())
    return any(
        literals >= max(_LEAST_CHARACTERS, _LEAST_SHARE * len(line)) and pattern.search(line)
        for pattern, literals in _templates()
    )


@functools.cache
def _templates() -> list[tuple[re.Pattern[str], int]]:
    """Of each string in the code a pattern, and how many characters of it are fixed."""
    found = {}
    for package in _PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                pieces = _pieces(node)
                literals = sum(len(piece) for piece in pieces if piece is not None)
                if literals >= _LEAST_CHARACTERS:
                    pattern = "".join(".*" if piece is None else re.escape(piece) for piece in pieces)
                    found[pattern] = (re.compile(pattern), literals)
    return list(found.values())


def _pieces(node: ast.AST) -> list[str | None]:
    """The fixed parts of a string, None for what is filled in; nothing for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [" ".join(node.value.split())]
    if isinstance(node, ast.JoinedStr):
        return [
            re.sub(r"\s+", " ", piece.value) if isinstance(piece, ast.Constant) else None
            for piece in node.values
        ]
    return []
