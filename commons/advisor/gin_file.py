"""What a gin file of one of the applications says about data and model.

The applications are run from a checkout and not installed with the library. Each has a module
`training.advisor_inputs` with the functions `configured_model` and `configured_lengths`.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from types import ModuleType
from typing import TYPE_CHECKING

import gin

from commons.advisor.input_error import InputError
from commons.advisor.lengths import SampleLengths
from commons.advisor.sample_cost import ConfiguredModel
from commons.gin_values import from_gin, is_bound

if TYPE_CHECKING:
    from commons.training import TrainerArgs

# By gin, by what gin files import, and by the settings' own checks.
_RAISED = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError),
    *(RecursionError, SyntaxError, TokenError, TypeError, ValueError),
)
_INCLUDE = re.compile(r"^\s*include\s+['\"](.+?)['\"]", re.MULTILINE)
# A setting that one application's files must have and the others' cannot.
_ONLY_IN_SID_GR = re.compile(r"^\s*DatasetArgs\.num_hierarchies\s*=", re.MULTILINE)


@dataclass(frozen=True)
class GinRun:
    """A parsed gin file; what it says is read when it is asked for."""

    path: Path
    application: ModuleType

    @staticmethod
    def parse(path: Path, bindings: Sequence[str]) -> GinRun:
        """Parses the file, as training does.

        Raises:
            InputError: there is no such file, it is malformed, or its application is not there.
        """
        if not path.is_file():
            raise InputError(f"{path} does not exist; expected a gin file")
        with _one_line(path):
            logging.getLogger("gin").setLevel(logging.CRITICAL)  # it logs what it raises, too
            application = _application(path)
            gin.parse_config_files_and_bindings([str(path)], list(bindings))
        return GinRun(path, application)

    def model(self) -> ConfiguredModel:
        """The model; InputError if the file does not say enough."""
        with _one_line(self.path):
            return self.application.configured_model()

    def lengths(self, num_random: int) -> SampleLengths:
        """The training samples, so many if they are random; InputError if there is no dataset."""
        with _one_line(self.path):
            lengths = self.application.configured_lengths(num_random)
        if lengths is None:
            raise InputError(
                f"{self.path} has no dataset; expected BenchmarkDatasetArgs or DatasetArgs in it"
            )
        return replace(lengths, source=f"{self.path} ({lengths.source})")

    def rows_per_rank(self, default: int) -> int:
        """`TrainerArgs.train_batch_size`, or the default if the file does not say it."""
        if not is_bound("TrainerArgs.train_batch_size"):
            return default
        return self._trainer().train_batch_size

    def balance_cost(self) -> Path | None:
        """The file of measured costs that the run balances by; None for FLOPs."""
        if not is_bound("TrainerArgs.balance_cost"):
            return None
        cost = self._trainer().balance_cost
        return None if cost == "flops" else Path(cost)

    def _trainer(self) -> TrainerArgs:
        from commons.training import TrainerArgs  # imports TorchRec, which takes seconds

        with _one_line(self.path):
            return from_gin(TrainerArgs)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """What gin and the settings' own checks raise, as an InputError that names the file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except _RAISED as error:
        raise InputError(f"{path}: {error}") from error


def _application(path: Path) -> ModuleType:
    """The module that reads such files.

    Raises:
        InputError: it cannot be imported.
    """
    package = "sid_gr" if _ONLY_IN_SID_GR.search(_with_includes(path)) else "hstu"
    # A console command, unlike `python -m`, does not look for packages in the working directory.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    import commons.quiet_logs  # noqa: F401

    try:
        return importlib.import_module(f"{package}.training.advisor_inputs")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise InputError(
            f"it is a file of {package}, which is not importable: run in a checkout of the repository, or "
            "give lengths in a file and the model by --model"
        ) from error


def _with_includes(path: Path) -> str:
    """The text of a gin file, and of those that it includes."""
    texts: dict[Path, str] = {}
    to_read = [path]
    while to_read:
        file = to_read.pop()
        if file not in texts and file.is_file():
            texts[file] = file.read_text()
            to_read += map(Path, _INCLUDE.findall(texts[file]))
    return "\n".join(texts.values())
