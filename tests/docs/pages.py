"""The pages that users read, and the code blocks in them."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text()
    for path in [
        *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((REPOSITORY / "docs").glob("*.md")),
    ]
}
_FENCE = re.compile(r"^ *```(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page, with its first line and its language."""

    page: str
    line: int
    language: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_excerpt(self) -> bool:
        """Whether this changes a reader's own program, and not a file that is named."""
        return self.language == "diff" and not self.code.startswith("---")


def _changed_program(block: Block) -> Block:
    """Returns the Python that a reader has after a change, each line where the page has it."""
    lines = ("" if line.startswith("-") else line[1:] for line in block.code.splitlines())
    return replace(block, language="python", code="\n".join(lines) + "\n")


def blocks_of(page: str) -> list[Block]:
    """Returns all fenced blocks of a page, in any language."""
    found: list[Block] = []
    lines: list[str] = []
    begun, language = None, ""
    for number, line in enumerate(PAGES[page].splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            if begun is not None:
                lines.append(line)
        elif begun is None:
            begun, language, lines = number, fence[1].strip(), []
        else:
            block = Block(page, begun, language, "\n".join(lines) + "\n")
            found.append(_changed_program(block) if block.is_excerpt else block)
            begun = None
    assert begun is None, f"{page}:{begun} is never closed"
    return found


def blocks(language: str) -> list[Block]:
    """Returns the blocks of one language on all pages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def commands(block: Block) -> list[list[str]]:
    """Returns the words of each command of a bash block, without comments and leading assignments."""
    lines = block.code.replace("\\\n", " ").splitlines()
    split = (shlex.split(line, comments=True) for line in lines)
    return [strip_assignments(words) for words in split if words]


def strip_assignments(words: list[str]) -> list[str]:
    """Drops leading `NAME=value` words."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words
