"""Whether the code has the words of a message."""

from __future__ import annotations

import ast
import functools

from tests.docs.pages import REPOSITORY

_PACKAGES = ("commons", "hstu", "sid_gr", "examples", "benchmarks")
# Fewer characters in a row are no evidence: what is filled in may be in the code by chance.
_LEAST_CHARACTERS = 8
# Of a line; the rest is what was filled in, or the name of an exception.
_LEAST_SHARE = 0.4


def is_in_code(line: str) -> bool:
    """Whether runs of characters that are in the code's strings make up most of the line."""
    line = " ".join(line.split())
    strings, covered, start = _strings_of_code(), 0, 0
    while start < len(line):
        end = start + _LEAST_CHARACTERS
        while end <= len(line) and line[start:end] in strings:
            end += 1
        length = end - 1 - start
        if length >= _LEAST_CHARACTERS:
            covered += length
            start += length
        else:
            start += 1
    return covered >= _LEAST_SHARE * len(line)


@functools.cache
def _strings_of_code() -> str:
    """The fixed parts of all strings of the code but its docstrings, one behind the other."""
    parts = []
    for package in _PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            parts += [
                " ".join(f"|{node.value}|".split())
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            ]
    return "\0".join(part.strip("|") for part in parts)
