"""Prints how many names, words, and pages a reader meets: `python -m ci.count_docs`."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
REFERENCE = REPOSITORY / "docs" / "reference"
TEXTS = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")


def names_on(page: str) -> list[str]:
    """Returns the full names that a page of the reference lists, such as "stable"."""
    return re.findall(r"^::: ([\w.]+)$", (REFERENCE / f"{page}.md").read_text(), re.MULTILINE)


def main() -> None:
    """Prints the counts."""
    for page in ("stable", "provisional"):
        print(f"{len(names_on(page)):7,} {page} names")
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    words = {path: len(path.read_text().split()) for path in [*(REPOSITORY / name for name in TEXTS), *pages]}
    for path, count in words.items():
        print(f"{count:7,} words in {path.relative_to(REPOSITORY)}")
    print(f"{sum(words.values()):7,} words on {len(words)} pages, {len(pages)} of them in docs")


if __name__ == "__main__":
    main()
