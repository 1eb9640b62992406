"""Tells whether a message quoted on a page is one that the code prints."""

import ast
import functools
import re

from tests.docs.pages import REPOSITORY

_PACKAGES = ("commons", "hstu", "sid_gr", "examples", "benchmarks")
# Shorter strings prove nothing: they occur in any line by chance.
_LEAST_CHARACTERS = 9
# The share of a line's letters that strings must have. The rest is filled in, or an exception's name.
_LEAST_SHARE = 0.4


def is_in_code(line: str) -> bool:
    """Returns whether strings of the code, with values filled in, make up most of a line."""
    line = _one_spaced(line)
    filled_in = functools.reduce(lambda left, text: left.replace(text, ""), _texts(), line)
    return _letters(filled_in) <= (1 - _LEAST_SHARE) * _letters(line)


@functools.cache
def _texts() -> list[str]:
    """Returns the fixed parts of all strings in the code, the longest first."""
    strings = _Strings()
    for package in _PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            strings.visit(ast.parse(path.read_text()))
    # An error may have a setting's name in braces, where it writes its value.
    parts = {part.strip() for text in strings.found for part in re.split(r"\{\w+\}", text)}
    return sorted((part for part in parts if len(part) >= _LEAST_CHARACTERS), key=len, reverse=True)


class _Strings(ast.NodeVisitor):
    """Collects strings that are no docstrings."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.add(_one_spaced(node.value))


def _one_spaced(text: str) -> str:
    return " ".join(text.split())


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))
