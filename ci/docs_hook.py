"""Puts the files outside docs/ that pages link to on the site, which `mkdocs` makes of docs/ alone.

The link from docs/tuning.md to ../benchmarks/README.md, for example, leads to the page
repository/benchmarks/README.md of the site. Code becomes a page, too, and a folder a list of its files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from markdown.blockprocessors import OListProcessor
from mkdocs.structure.files import File, Files, InclusionLevel

REPOSITORY = Path(__file__).parents[1]
FOLDER = "repository"  # of the site
ALWAYS = ("benchmarks/README.md", "CHANGELOG.md")  # in the navigation
LINK = re.compile(r"(?<=\]\()(?![\w+]+:)[^)\s#]+(?=[)#])")
PICTURES = (".png", ".svg")
OListProcessor.LAZY_OL = False  # a list that begins at 7 is numbered from 7, as on GitHub
# By the address of a page: the file of the repository that it shows.
_shown: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each file that pages link to, and for each that these pages link to in turn."""
    _shown.clear()
    _shown.update((file.src_uri, f"docs/{file.src_uri}") for file in files.documentation_pages())
    waiting = list(ALWAYS)
    for path in _shown.values():
        waiting += _links(path, (REPOSITORY / path).read_text())
    while waiting:
        path = waiting.pop()
        address = _address(path)
        if path.startswith("docs/") or address in _shown:
            continue
        _shown[address] = path
        if path.endswith(PICTURES):
            files.append(File.generated(config, address, abs_src_path=str(REPOSITORY / path)))
            continue
        text = _page(path)
        inclusion = InclusionLevel.UNDEFINED if path in ALWAYS else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, address, content=text, inclusion=inclusion))
        waiting += _links(path, text)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replaces links to files of the repository by links to their pages."""
    address = page.file.src_uri
    path = _shown[address]

    def on_site(link: re.Match) -> str:
        target = _target(path, link[0])
        return link[0] if target is None else os.path.relpath(_address(target), os.path.dirname(address))

    return LINK.sub(on_site, markdown)


def _links(path: str, text: str) -> list[str]:
    """Returns the files of the repository that the Markdown of `path` links to."""
    return [target for link in LINK.findall(text) if (target := _target(path, link)) is not None]


def _target(path: str, link: str) -> str | None:
    """Returns the file that a link on `path` leads to, from the repository's root; None if there is none."""
    target = os.path.normpath(os.path.join(os.path.dirname(path), link))
    return target if (REPOSITORY / target).exists() and not target.startswith("..") else None


def _address(path: str) -> str:
    """Returns the file of the site that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}/{path}" if path.endswith((".md", *PICTURES)) else f"{FOLDER}/{path}.md"


def _page(path: str) -> str:
    """Returns the Markdown that shows a file or a folder."""
    file = REPOSITORY / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.is_file())
        shown = [f"[{name}]({file.name}/{name})" if name.endswith(".py") else f"`{name}`" for name in names]
        return "\n".join([f"# {path}", "", *(f"- {each}" for each in shown)])
    text = file.read_text()
    if path.endswith(".md"):
        return text
    return (
        f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{file.suffix[1:]}\n{text}\n````\n"
    )
