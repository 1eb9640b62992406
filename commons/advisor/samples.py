"""Samples: their lengths as read from files, their tokens, and what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING

import numpy as np

from ..perf_model.cost import Cost
from . import InputError
from .pieces import FLOPS, PieceCosts

if TYPE_CHECKING:
    import polars as pl

FORMATS = (".csv", ".npy", ".parquet")
# Exit codes of the process that reads a column.
_REFUSED, _MISSING_PACKAGE = 3, 4
# Training time ÷ forward FLOPs: the backward pass has two matrix products for each one of the forward pass.
TRAINING_FLOPS_PER_FORWARD = 3


@dataclass(frozen=True)
class TokenRule:
    """Tokens of a sample: `per_item` × its length + `extra`."""

    per_item: int
    extra: int

    def of(self, items: np.ndarray) -> np.ndarray:
        """Returns the tokens of samples, int64 `[samples]`; `items` are their lengths, int64 `[samples]`."""
        return self.per_item * items + self.extra

    def __str__(self) -> str:
        scaled = "length" if self.per_item == 1 else f"{self.per_item} × length"
        return scaled if self.extra == 0 else f"{scaled} + {self.extra}"


# By model. HSTU has an action after each item and usually one user token; most published SID-GR models encode
# an item as three codes.
TOKEN_RULES = {"hstu": TokenRule(2, 1), "sid_gr": TokenRule(3, 0), "transformer": TokenRule(1, 0)}


@dataclass(frozen=True)
class LengthSummary:
    """Statistics of sequence lengths."""

    min: int
    mean: float
    median: float
    p99: float
    max: int


@dataclass(frozen=True)
class IdColumn:
    """The ids of all samples, in a file.

    Attributes:
        lengths: int64 `[samples]`, how many each has.
        read: samples, int64 `[n]`, ascending, to their ids, one sample's after the other's.
    """

    lengths: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]

    def of(self, samples: np.ndarray) -> dict[int, np.ndarray]:
        """Reads the ids of some samples, int64 `[n]`; returns them by sample."""
        samples = np.unique(samples)
        ids = np.split(self.read(samples), np.cumsum(self.lengths[samples])[:-1])
        return dict(zip(samples.tolist(), ids, strict=True))


@dataclass(frozen=True)
class SampleLengths:
    """The samples of one epoch.

    Attributes:
        items: int64 `[samples]`, the length of each.
        tokens: int64 `[samples]`, what a model computes on each.
        token_rule: rule by which tokens follow from lengths, in words.
        source: origin of the lengths, in words.
        ids: ids of the samples; None if they are unknown.
        groups: int64 `[samples]`, equal for samples that belong together; None if unknown.
        group_column: the column that names them.
        origin: figures that drawn lengths were fitted to, in a sentence without a period; None for read ones.
    """

    items: np.ndarray
    tokens: np.ndarray
    token_rule: str
    source: str
    ids: IdColumn | None = None
    groups: np.ndarray | None = None
    group_column: str | None = None
    origin: str | None = None

    @property
    def in_file_order(self) -> bool:
        """Whether steps take samples in the file's order, because results depend on who shares ids."""
        return self.ids is not None or self.groups is not None

    @cached_property
    def summary(self) -> LengthSummary:
        """Statistics of `items`."""
        smallest, median, p99, largest = np.percentile(self.items, [0, 50, 99, 100])
        return LengthSummary(int(smallest), float(self.items.mean()), float(median), float(p99), int(largest))


@dataclass(frozen=True)
class ConfiguredModel:
    """A model of known dimensions.

    Attributes:
        work: tokens, int64 `[samples]`, to forward FLOPs, int64 `[samples, 2]`: those of matrix products and
            of attention.
        description: description in words.
        tokens: the rule for data that does not state its tokens.
        pieces: costs of pieces of samples in FLOPs.
    """

    work: Callable[[np.ndarray], np.ndarray]
    description: str
    tokens: TokenRule
    pieces: PieceCosts


@dataclass(frozen=True)
class SampleCost:
    """The samples to balance, and how long a rank takes to compute them.

    Attributes:
        model: whose FLOPs costs are of.
        cost: cost of samples, tokens and FLOPs.
        assumption: time that a step is assumed to take, in words.
        seconds_per_unit: seconds of training per unit of cost; None if unknown.
        setting: `balance_cost` of a training that balances by it; None for FLOPs.
    """

    model: ConfiguredModel
    cost: Cost
    assumption: str
    seconds_per_unit: float | None = None
    setting: str | None = None

    @property
    def unit(self) -> str:
        """Unit of the loads."""
        return "FLOPs" if self.cost == FLOPS else "predicted ns"

    @property
    def pieces(self) -> PieceCosts:
        """The costs of pieces of samples."""
        return replace(self.model.pieces, cost=self.cost)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the workloads of samples of so many tokens, both int64 `[samples]`.

        Raises:
            InputError: a sample costs more than int64 holds.
        """
        fewer, longest = np.ones(1, dtype=np.int64), int(tokens.max())
        while fewer[0] < longest:
            # A cost is at most quadratic: twice the tokens cost at most four times as much.
            if not 0 <= self._costs(fewer)[0] < 2**60:
                raise InputError(
                    f"a sample of {longest} tokens costs more than 2^62 in {self.model.description}"
                )
            fewer *= 2
        return self._costs(tokens)

    def _costs(self, tokens: np.ndarray) -> np.ndarray:
        return self.cost.of(1, tokens, self.model.work(tokens))

    def step_times(self, largest_loads: np.ndarray) -> np.ndarray:
        """Returns the time of each step, in seconds if known, else in units of cost."""
        if self.seconds_per_unit is None:
            return largest_loads
        return self.cost.per_step * 1e-9 + self.seconds_per_unit * largest_loads


def flops_cost(model: ConfiguredModel, tflops: float | None) -> SampleCost:
    """Returns the cost in FLOPs; `tflops`, in 10¹² FLOP/s, is what a device achieves in training, or None."""
    rate = "Without --tflops or --cost, only ratios are predicted"
    if tflops is not None:
        rate = f"Every device achieves {tflops:g} TFLOP/s at all lengths"
    assumption = (
        f"A step takes as long as its slowest rank computes: {TRAINING_FLOPS_PER_FORWARD} × the layers' "
        f"forward FLOPs (forward + backward). {rate}. Work that does not depend on lengths counts as 0: the "
        "more of it there is, the smaller the speedups. FLOPs also hide kernels that are slower at some "
        "lengths; a measured or learned cost (--cost) has them"
    )
    per_unit = None if tflops is None else TRAINING_FLOPS_PER_FORWARD / (tflops * 1e12)
    return SampleCost(model, FLOPS, assumption, per_unit)


def cost_from_file(path: Path, model: ConfiguredModel) -> SampleCost:
    """Reads the cost that a calibration measured, or a run learned, of a model.

    Raises:
        InputError: the file does not exist, holds something else, or is of a model with other columns.
    """
    try:
        cost = Cost.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--cost {path}: {error}") from error
    if cost.num_columns != FLOPS.num_columns:
        raise InputError(
            f"--cost {path} is of a get_workloads with {cost.num_columns} columns; expected "
            f"{FLOPS.num_columns}, FLOPs of matrix products and of attention, as the models here have them"
        )
    assumption = (
        f"A step takes {f'{cost.per_step / 1e6:.3g} ms plus ' if cost.per_step else ''}the measured time of "
        f"the slowest rank's samples ({path}, median error {cost.median_error:.1%}); samples are balanced by "
        "these times"
    )
    return SampleCost(model, cost, assumption, seconds_per_unit=1e-9, setting=str(path))


def format_of(path: Path) -> str:
    """Returns which of `FORMATS` a file's name ends with, or another ending."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz") if name.endswith(".csv.gz") else name).suffix


def read_lengths(path: Path, column: str | None, option: str = "--column") -> np.ndarray:
    """Reads sequence lengths, int64 `[samples]`.

    Args:
        path: `.npy`, a one-dimensional array of integers; or `.csv`, `.csv.gz` or `.parquet`.
        column: column of a `.csv` or `.parquet` file: integers, or lists in Parquet, whose lengths count.
            None for the only column.
        option: option that named the column, for messages.

    Raises:
        InputError: the file or the column does not exist, or its values are not lengths.
    """
    if format_of(path) not in FORMATS:
        raise InputError(f"{path} has an unknown format; expected {', '.join(FORMATS)} or .gin")
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {state}; expected a file of sequence lengths")
    if format_of(path) == ".npy":
        if column is not None:
            raise InputError(f"{option} {column} has no effect on {path}; expected it with .csv or .parquet")
        lengths = _read_array(path)
    else:
        lengths = _read_column(path, option, column)
    if len(lengths) == 0:
        raise InputError(f"{path} is empty; expected one length per sample")
    wrong = (lengths < 0) | (lengths >= 2**31)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(f"{path}, row {row}: length {lengths[row]}; expected at least 0 and less than 2^31")
    return lengths.astype(np.int64, copy=False)


def _read_column(path: Path, option: str, column: str | None) -> np.ndarray:
    """Reads lengths in a process of its own, which takes the memory of polars along when it ends.

    That imports nothing of the calling program, and ends soon if this process is gone.
    """
    program = f"from {__package__}.samples import write_lengths; write_lengths()"
    given = [str(path), option, *([] if column is None else [column])]
    environment = {
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # the others of pyarrow keep what is freed
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ended = subprocess.run([sys.executable, "-c", program, *given], env=environment, capture_output=True)
    if ended.returncode == 0:
        return np.load(BytesIO(ended.stdout))
    if ended.returncode == _MISSING_PACKAGE:
        raise ModuleNotFoundError(name=ended.stdout.decode())
    if ended.returncode == _REFUSED:
        raise InputError(ended.stdout.decode(errors="surrogateescape"))
    reason = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise InputError(f"{path} cannot be read: {reason or f'its reader ended with {ended.returncode}'}")


def write_lengths() -> None:
    """Writes the lengths that the arguments of the process name to stdout; or why not, and exits."""
    path, option, *column = sys.argv[1:]
    try:
        from .columns import read_column_lengths  # imports polars

        lengths = read_column_lengths(Path(path), option, column[0] if column else None)
    except (InputError, ModuleNotFoundError) as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        text = str(error.name if isinstance(error, ModuleNotFoundError) else error)
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
        sys.exit(_MISSING_PACKAGE if is_missing else _REFUSED)
    np.save(sys.stdout.buffer, lengths)


def _read_array(path: Path) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, SyntaxError, TokenError) as error:
        raise InputError(f"{path} cannot be read as an array: {error}") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise InputError(f"{path} has shape {np.shape(values)}; expected one dimension, [samples]")
    if values.dtype.kind not in "iu":
        # NaN equals nothing, so it counts as a fraction.
        fractions = values != np.floor(values) if values.dtype.kind == "f" else np.zeros(0, dtype=bool)
        example = example_of(values, np.flatnonzero(fractions))
        raise InputError(f"{path} holds {values.dtype}{example}; expected integers")
    return values


def example_of(values: np.ndarray | pl.Series, rows: np.ndarray | pl.Series) -> str:
    """Names the first of `rows` and its value, in parentheses."""
    return f" (row {rows[0]} is {values[int(rows[0])]})" if len(rows) else ""
