"""The command `balance-advisor`, also run as `python -m commons.advisor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import quiet_logs  # noqa: F401
from . import InputError
from .command_line import parse_request

# Optional packages. Parquet and CSV need polars, lists in Parquet also need pyarrow, a page needs jinja2,
# and a gin file needs all of them.
_FROM_TRAIN = ("gin", "jinja2", "polars", "pyarrow", "tensorboard", "tqdm")
_FROM_TORCHREC = ("fbgemm_gpu", "tensordict", "torch", "torchmetrics", "torchrec")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code, which is 2 for wrong input or a missing package."""
    try:
        _run(argv)
    except InputError as error:
        return _failed(error)
    except ModuleNotFoundError as error:
        if error.name in _FROM_TRAIN:
            return _failed(
                f'{error.name} is not installed; it comes with the extra "train": in a checkout, '
                'pip install ".[train]"'
            )
        if error.name not in _FROM_TORCHREC:
            raise
        return _failed(
            f'{error.name} is not installed; a gin file needs TorchRec and the extra "train": '
            "docs/installing.md tells how to install them in a checkout"
        )
    return 0


def _run(argv: Sequence[str] | None) -> None:
    request = parse_request(argv)
    # Imported late: these modules import numba, and reading the file takes less memory without it.
    from .advice import advise
    from .report import json_report, text_report

    if request.html is not None:
        from .page import html_page  # imported before the work, because jinja2 may be missing
    advice = advise(request)
    if request.html is not None:
        _write(request.html, html_page(advice))
    _print(json_report(advice) if request.as_json else text_report(advice))


def _failed(reason: object) -> int:
    print(f"balance-advisor: error: {reason}", file=sys.stderr)
    return 2


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8", errors="replace")  # a file name may hold any bytes
    except OSError as error:
        raise InputError(f"--html {path}: {error}") from error


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except (OSError, UnicodeError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        if not isinstance(error, BrokenPipeError):  # a reader such as `head` has seen enough
            raise InputError(f"stdout cannot be written to: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
