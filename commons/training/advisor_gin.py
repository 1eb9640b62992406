"""Reads the data and the model from an application's gin file, for `balance-advisor`.

Each application has a module `training.advisor_inputs` with the functions `configured_model` and
`configured_lengths`.
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
from types import ModuleType

from ..advisor import InputError
from ..advisor.samples import ConfiguredModel, SampleLengths
from ..advisor.strategies import CHOSEN
from ..datasets.gin_values import from_gin, is_bound, parse_gin
from .training_args import TrainerArgs

_INCLUDE = re.compile(r"^\s*include\s+['\"](.+?)['\"]", re.MULTILINE)
# A setting that SID-GR's gin files must have, and that no other gin file can have.
_ONLY_IN_SID_GR = re.compile(r"^\s*DatasetArgs\.num_hierarchies\s*=", re.MULTILINE)


@dataclass(frozen=True)
class GinRun:
    """A parsed gin file. Its methods raise InputError if settings are missing or contradict each other."""

    path: Path
    application: ModuleType

    @staticmethod
    def parse(path: Path, bindings: Sequence[str]) -> GinRun:
        """Parses the file as training does.

        Raises:
            InputError: the file does not exist or is malformed, or its application cannot be imported.
        """
        with _naming(path):
            logging.getLogger("gin").setLevel(logging.CRITICAL)  # gin also logs the errors that it raises
            application = _application(path)
            parse_gin(path, bindings)
        return GinRun(path, application)

    def model(self) -> ConfiguredModel:
        """Returns the model that the file configures."""
        with _naming(self.path):
            return self.application.configured_model()

    def lengths(self, num_random: int) -> SampleLengths:
        """Returns the training samples; `num_random` samples if the dataset is random."""
        with _naming(self.path):
            lengths = self.application.configured_lengths(num_random)
        if lengths is None:
            raise InputError(
                f"{self.path} has no dataset; expected BenchmarkDatasetArgs or DatasetArgs in it"
            )
        return replace(lengths, source=f"{self.path} ({lengths.source})")

    def settings(self) -> dict[str, object]:
        """Returns the file's settings of `TrainerArgs`, as far as the advisor uses them."""
        names = [
            "train_batch_size",
            "enable_balanced_shuffler",
            "max_tokens_per_micro_batch",
            *(f"balance_{name}" for name in (*CHOSEN, "cost", "group_feature", "speed_limit")),
        ]
        bound = [name for name in names if is_bound(f"TrainerArgs.{name}")]
        return {name: getattr(self._trainer(), name) for name in bound}  # a macro's value, not its name

    def cost_file(self) -> Path | None:
        """Returns the file of the run's measured or learned cost; None for FLOPs, or before it is learned."""
        return self._trainer().cost_file()

    def _trainer(self) -> TrainerArgs:
        with _naming(self.path):
            return from_gin(TrainerArgs)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Re-raises errors as an InputError that names the file. What gin imports may raise any error."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{path}: {error}") from error


def _application(path: Path) -> ModuleType:
    """Imports the application's module that reads its gin files."""
    package = "sid_gr" if _ONLY_IN_SID_GR.search(_with_includes(path)) else "hstu"
    # A console command, unlike `python -m`, does not look for packages in the working directory.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(f"{package}.training.advisor_inputs")


def _with_includes(path: Path) -> str:
    """Returns the text of a gin file and of all files that it includes."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return "\n".join([text, *(_with_includes(Path(included)) for included in _INCLUDE.findall(text))])
