"""The command `balance-advisor`, also run as `python -m commons.advisor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .. import quiet_logs  # noqa: F401
from . import InputError
from .advice import advise
from .command_line import parse_request
from .report import json_report, text_report

# Parquet and CSV need polars, a page needs jinja2, and a gin file needs all of them.
_FROM_TORCHREC = ("fbgemm_gpu", "tensordict", "torch", "torchmetrics", "torchrec")
_OPTIONAL = ("gin", "jinja2", "polars", "tensorboard", "tqdm", *_FROM_TORCHREC)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code, which is 2 for wrong input or a missing package."""
    try:
        request = parse_request(argv)
        if request.html is not None:
            from .page import html_page  # imported before the work, because jinja2 may be missing
        advice = advise(request)
        if request.html is not None:  # a file name may hold any bytes
            request.html.write_text(html_page(advice), encoding="utf-8", errors="replace")
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        return _failed(
            f'{error.name} is not installed; the extra "train" has all but TorchRec, which only gin files '
            'need: in a checkout, pip install ".[train]", or see docs/getting-started.md'
        )
    except (InputError, OSError) as error:
        return _failed(error)
    print(json_report(advice) if request.as_json else text_report(advice))
    return 0


def _failed(reason: object) -> int:
    print(f"balance-advisor: error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
