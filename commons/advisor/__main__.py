"""Says what balancing would gain: `balance-advisor`, or `python -m commons.advisor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_OF_EXTRA = ("gin", "polars", "tensorboard", "torchmetrics", "tqdm")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 if what the user gave is wrong or an extra is missing."""
    try:
        from commons.advisor.command import run

        return run(argv)
    except ModuleNotFoundError as error:
        if error.name not in _OF_EXTRA:
            raise
        print(
            f"balance-advisor: error: the package {error.name} is missing: install recsys-workload-balancer "
            'with its extra "train", as in pip install "recsys-workload-balancer[train]"',
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
