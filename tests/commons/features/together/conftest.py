"""Leaves out tests of features that a copy of the repository does not have."""

from __future__ import annotations

import re
from pathlib import Path

import commons

_FEATURES = Path(commons.__file__).parent / "features"


def _has_all_features(test: Path) -> bool:
    named = re.findall(r"commons\.features\.(?!together)(\w+)", test.read_text())
    return all((_FEATURES / name / "__init__.py").exists() for name in named)


collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if not _has_all_features(path)]
