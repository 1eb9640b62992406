"""Leaves out tests of extensions that a copy of the repository does not have."""

import re
from pathlib import Path

import commons

_EXTENSIONS = Path(commons.__file__).parent / "extensions"


def _has_all_extensions(test: Path) -> bool:
    named = re.findall(r"commons\.extensions\.(?!together)(\w+)", test.read_text())
    return all((_EXTENSIONS / name / "__init__.py").exists() for name in named)


_TESTS = Path(__file__).parent.glob("test_*.py")
collect_ignore = [test.name for test in _TESTS if not _has_all_extensions(test)]
