"""Leaves out tests of features that a copy of the repository does not have."""

from __future__ import annotations

import re
from pathlib import Path

import commons

_FEATURES = Path(commons.__file__).parent / "features"


def _has_all_features(test: Path) -> bool:
    named = re.findall(r"commons\.features\.(?!together)(\w+)", test.read_text())
    return all((_FEATURES / name / "__init__.py").exists() for name in named)


_TESTS = Path(__file__).parent.glob("test_*.py")
collect_ignore = [test.name for test in _TESTS if not _has_all_features(test)]
