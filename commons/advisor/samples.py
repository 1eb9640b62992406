"""Samples: their lengths as read from files, their tokens, and their costs."""

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
# Training FLOPs ÷ forward FLOPs: the backward pass has two matrix products for each forward one.
TRAINING_FLOPS_PER_FORWARD = 3


@dataclass(frozen=True)
class TokenRule:
    """Tokens of a sample: `per_item` × its length + `extra`."""

    per_item: int
    extra: int

    def of(self, items: np.ndarray) -> np.ndarray:
        """Returns the tokens of samples with lengths `items`, both int64 `[samples]`."""
        return self.per_item * items + self.extra

    def __str__(self) -> str:
        scaled = "length" if self.per_item == 1 else f"{self.per_item} × length"
        return scaled if self.extra == 0 else f"{scaled} + {self.extra}"


# Defaults by model. HSTU has an action after each item and usually one user token. Most published SID-GR
# models encode an item as three codes.
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
    """The ids of all samples, which are read from a file on demand.

    Attributes:
        lengths: number of ids of each sample, int64 `[samples]`.
        read: function that takes ascending sample numbers, int64 `[n]`, and returns their ids concatenated.
    """

    lengths: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]

    def of(self, samples: np.ndarray) -> dict[int, np.ndarray]:
        """Reads the ids of some samples, and returns them by sample number. `samples` may have any shape."""
        samples = np.unique(samples)
        ids = np.split(self.read(samples), np.cumsum(self.lengths[samples])[:-1])
        return dict(zip(samples.tolist(), ids, strict=True))


@dataclass(frozen=True)
class SampleLengths:
    """The samples of one epoch.

    Attributes:
        items: length of each sample, int64 `[samples]`.
        tokens: number of tokens that a model computes for each sample, int64 `[samples]`.
        token_rule: rule by which tokens follow from lengths, in words.
        source: origin of the lengths, in words.
        ids: ids of the samples; None if they are unknown.
        groups: group of each sample, int64 `[samples]`, negative for no group; None if unknown.
        group_column: name of the column that holds the groups.
        origin: figures that drawn lengths match, in a sentence without a period; None for other lengths.
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
        """Whether steps follow the file's order, which decides whose ids or groups meet in a step."""
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
        work: function that takes tokens, int64 `[samples]`, and returns the forward FLOPs of matrix products
            and of attention, int64 `[samples, 2]`.
        description: description in words.
        tokens: token rule for data that states only lengths.
        pieces: costs of pieces of samples in FLOPs.
    """

    work: Callable[[np.ndarray], np.ndarray]
    description: str
    tokens: TokenRule
    pieces: PieceCosts


@dataclass(frozen=True)
class SampleCost:
    """The cost to balance by, and the training time that it stands for.

    Attributes:
        model: model whose FLOPs enter the cost.
        cost: cost as a sum over samples, tokens, and FLOPs.
        assumption: assumption about the time of a step, in words.
        seconds_per_unit: seconds of training per unit of cost; None if unknown.
        setting: value of `balance_cost` with which training balances by the cost; None for FLOPs.
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
        """Returns the workloads of samples from their tokens, both int64 `[samples]`.

        Raises:
            InputError: a sample costs more than int64 holds.
        """
        fewer, longest = np.ones(1, dtype=np.int64), int(tokens.max())
        while fewer[0] < longest:
            # A cost is at most quadratic, so twice the tokens cost at most four times as much.
            if not 0 <= self._costs(fewer)[0] < 2**60:
                raise InputError(
                    f"a sample of {longest} tokens costs more than 2^62 in {self.model.description}"
                )
            fewer *= 2
        return self._costs(tokens)

    def _costs(self, tokens: np.ndarray) -> np.ndarray:
        return self.cost.of(1, tokens, self.model.work(tokens))

    def step_times(self, largest_loads: np.ndarray) -> np.ndarray:
        """Returns each step's time from its largest load, in seconds if known, else in units of cost."""
        if self.seconds_per_unit is None:
            return largest_loads
        return self.cost.per_step * 1e-9 + self.seconds_per_unit * largest_loads


def flops_cost(model: ConfiguredModel, tflops: float | None) -> SampleCost:
    """Returns the cost in FLOPs. `tflops` is a device's rate in training, in 10¹² FLOP/s, None if unknown."""
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
    """Reads a model's cost from a file that a calibration or a training run wrote.

    Raises:
        InputError: the file does not exist, does not hold a cost, or has other columns than the model.
    """
    try:
        cost = Cost.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--cost {path}: {error}") from error
    if cost.num_columns != FLOPS.num_columns:
        raise InputError(
            f"--cost {path} is for {cost.num_columns} columns of get_workloads; expected "
            f"{FLOPS.num_columns}, FLOPs of matrix products and of attention, as the models here have them"
        )
    assumption = (
        f"A step takes {f'{cost.per_step / 1e6:.3g} ms plus ' if cost.per_step else ''}the measured time of "
        f"the slowest rank's samples ({path}, median error {cost.median_error:.1%}); samples are balanced by "
        "these times"
    )
    return SampleCost(model, cost, assumption, seconds_per_unit=1e-9, setting=str(path))


def format_of(path: Path) -> str:
    """Returns a file's ending in lower case, `.csv` for `.csv.gz`. The ending need not be in `FORMATS`."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz") if name.endswith(".csv.gz") else name).suffix


def read_lengths(path: Path, column: str | None, option: str = "--column") -> np.ndarray:
    """Reads sequence lengths, int64 `[samples]`.

    Args:
        path: `.npy` file of a one-dimensional integer array, or a `.csv`, `.csv.gz`, or `.parquet` file.
        column: column of a `.csv` or `.parquet` file, which holds integers or, in Parquet, lists to count.
            None means the only column.
        option: option of the command line that named the column, for messages.

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
    """Reads lengths in a separate process, whose end frees the memory that polars took.

    The process imports nothing from the calling program, and ends soon after this process dies.
    """
    program = f"from {__package__}.samples import write_lengths; write_lengths()"
    given = [str(path), option, *([] if column is None else [column])]
    environment = {
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # pyarrow's other pools keep freed memory
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
    """Writes the lengths that `sys.argv` names to stdout. On an error, writes the error's text and exits."""
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
    """Returns the first of `rows` and its value in parentheses, or an empty string if there is none."""
    return f" (row {rows[0]} is {values[int(rows[0])]})" if len(rows) else ""
