"""Tells whether a message quoted on a page is one that the code prints."""

import ast
import functools
import re
from collections.abc import Iterator

from tests.docs.pages import REPOSITORY

_PACKAGES = ("commons", "hstu", "sid_gr", "examples", "benchmarks")
# Shorter strings prove nothing: they occur in any line by chance.
_LEAST_CHARACTERS = 12
# The share of a line that strings must cover. The rest is filled in, or an exception's name.
_LEAST_SHARE = 0.4


def is_in_code(line: str) -> bool:
    """Returns whether strings of the code, with values filled in, make up most of a line.

    The line may end before the string does.
    """
    line = _one_spaced(line).rstrip("… ")
    covered: set[int] = set()
    for pieces in _templates():
        covered |= _covered(line, pieces)
    return len(covered) >= _LEAST_SHARE * len(line)


def _covered(line: str, pieces: tuple[str, ...]) -> set[int]:
    """Returns the positions of a string's fixed parts in a line, in order; empty if one is missing."""
    covered: set[int] = set()
    start = 0
    for piece in pieces:
        found = line.find(piece, start)
        if found < 0:
            length = max((n for n in range(1, len(piece)) if line.endswith(piece[:n], start)), default=0)
            covered |= set(range(len(line) - length, len(line)))
            is_cut_off = length and len(covered) >= _LEAST_CHARACTERS
            return covered if is_cut_off else set()
        start = found + len(piece)
        covered |= set(range(found, start))
    return covered


@functools.cache
def _templates() -> list[tuple[str, ...]]:
    """Returns the fixed parts of every string in the code that is long enough."""
    found = set()
    for package in _PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for pieces in _strings(ast.parse(path.read_text())):
                if sum(map(len, pieces)) >= _LEAST_CHARACTERS:
                    found.add(pieces)
    return sorted(found)


def _strings(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.JoinedStr):
            constants = (piece.value for piece in node.values if isinstance(piece, ast.Constant))
            yield tuple(part for piece in constants for part in _parts(_one_spaced(str(piece))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield tuple(_parts(_one_spaced(node.value).strip()))
        else:
            yield from _strings(node)


def _parts(text: str) -> list[str]:
    """Divides a text at names in braces, where an error writes a setting and its value."""
    return [part for part in re.split(r"\{\w+\}", text) if part]


def _one_spaced(text: str) -> str:
    return re.sub(r"\s+", " ", text)
