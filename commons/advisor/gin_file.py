"""What a gin file of one of the applications says about data and model.

The applications are run from a checkout and not installed with the library. Each has a module
`training.advisor_inputs` with the functions `configured_model` and `configured_lengths`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import gin

from commons.advisor.input_error import InputError
from commons.advisor.lengths import SampleLengths
from commons.advisor.sample_cost import ConfiguredModel
from commons.gin_values import from_gin

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

    def rows_per_rank(self) -> int:
        """`TrainerArgs.train_batch_size`; InputError if the file does not say it."""
        from commons.training import TrainerArgs  # imports TorchRec, which takes seconds

        with _one_line(self.path):
            return from_gin(TrainerArgs).train_batch_size


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """What gin and the settings' own checks raise, as an InputError that names the file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError, SyntaxError, OSError, ImportError) as error:
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
    text = path.read_text()
    included = [Path(name) for name in _INCLUDE.findall(text)]
    return "\n".join([text, *(_with_includes(file) for file in included if file.is_file() and file != path)])
