"""Reads checkpoints as plain data. torch's own reader unpickles them, and a pickle can run any program."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import ReadItem

METADATA_FILE = ".metadata"

# Names that DCP's metadata file may refer to, by module. Torch's dtypes are among them.
_PLAIN = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # in Python 3.13
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.serialization": {"_get_layout"},
}


class PlainReader(FileSystemReader):
    """Reads checkpoints without running code that may be in them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata of a checkpoint.

        Raises:
            ValueError: the file does not contain metadata, or contains anything but plain data.
        """
        path = Path(self.path) / METADATA_FILE
        with path.open("rb") as file:
            try:
                metadata = _PlainUnpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # pickle raises a different type for each kind of damage
                raise ValueError(f"{path} is refused: {error}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} is refused: it holds a {type(metadata).__name__}, expected Metadata")
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Loads non-tensor values without running code that may be in them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads one value.

        Raises:
            ValueError: the value is not plain data.
        """
        try:
            plain = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{read_item.dest_index.fqn} is refused: it is not plain data ({error})"
            ) from error
        copied = io.BytesIO()  # our copy, because torch's planner unpickles any input
        torch.save(plain, copied)
        copied.seek(0)
        super().load_bytes(read_item, copied)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle enums
            return lambda enum, member: enum[member]
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, and only plain data is read, because a pickle can run any program"
            )
        return super().find_class(module, name)
