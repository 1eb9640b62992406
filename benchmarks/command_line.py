"""The command line of a benchmark."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def parse_arguments(description: str | None, **positionals: dict[str, Any]) -> argparse.Namespace:
    """Parses the command line; `--help` prints `description`, and an argument too many ends the process.

    Args:
        description: the module's docstring.
        positionals: by name, the keyword arguments of `ArgumentParser.add_argument`.
    """
    module = sys.modules["__main__"].__spec__
    name = "" if module is None else module.name.removesuffix(".__main__")
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for positional, settings in positionals.items():
        parser.add_argument(positional, **settings)
    return parser.parse_args()
