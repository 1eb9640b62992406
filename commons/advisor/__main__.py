"""The command `balance-advisor`, also run as `python -m commons.advisor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from commons.advisor import InputError

# TorchRec and what the extra "train" installs.
_PACKAGES = (
    *("fbgemm_gpu", "torch", "torchrec"),
    *("gin", "jinja2", "polars", "tensorboard", "torchmetrics", "tqdm"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for wrong input or a missing package."""
    try:
        _run(argv)
    except InputError as error:
        return _failed(error)
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        return _failed(
            f"the package {error.name} is missing: install TorchRec, and recsys-workload-balancer with its "
            'extra "train", as in pip install "recsys-workload-balancer[train]"'
        )
    return 0


def _run(argv: Sequence[str] | None) -> None:
    # Imported here, so that main can name a missing package.
    from commons.advisor.advice import advise
    from commons.advisor.command_line import parse_request
    from commons.advisor.page import html_page
    from commons.advisor.report import json_report, text_report

    request = parse_request(argv)
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
