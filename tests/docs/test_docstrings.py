"""Entries under Args and Attributes begin with a noun, or with "whether" or "True"."""

import ast
import re

import pytest

from tests.docs.pages import REPOSITORY

SECTION = re.compile(r"^(?:Args|Attributes):\n((?: .*\n|\n)+)", re.MULTILINE)
NO_NOUN = re.compile(
    r"(as|at|by|for|from|given|how|if|in|makes?|maps?|must|None|of|on|returns?|see|takes?|that|to|what|when"
    r"|where|with)\b"
)


@pytest.mark.parametrize("folder", ["commons", "hstu", "sid_gr"])
def test_entries_begin_with_a_noun(folder):
    found = 0
    for path in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for section in SECTION.findall(f"{ast.get_docstring(node) or ''}\n"):
                    entries = re.findall(r"^    (\w[\w*, ]*): (.*)", section, re.MULTILINE)
                    assert not [entry for entry in entries if NO_NOUN.match(entry[1])], path
                    found += len(entries)
    assert found > 10
