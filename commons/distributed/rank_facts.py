"""Plain values of batches, such as a longest length, which stay with their rank when samples move."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..sequence_batch.row_lists import PlainList, hash_facts
from ..sequence_batch.row_schema import flattened, hash_bytes
from ..sequence_batch.rows import Rows
from .channel import Channel
from .rank_group import ranks_text

logger = logging.getLogger(__name__)
_IF_OF_RANK = (
    "If it belongs to the rank, name it in the shuffler's shared_fields, or mark the field of a BaseBatch "
    'with field(metadata={"per_sample": False})'
)


class _Told(NamedTuple):
    """What a rank tells others of one of its facts."""

    hashed: int
    text: str
    has_rows: bool


class RankFacts:
    """Compares the plain values of batches between ranks, and warns of each that differs, once.

    Ranks compare one hash of all values in each step. Only if the hashes differ, they gather the values.

    Args:
        channel: channel of the ranks that exchange samples.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._differ: set[str] = set()  # paths that were found to differ, the same on all ranks

    def hash_of(self, batch: Rows) -> int:
        """Returns a hash of the facts that are not yet known to differ."""
        return hash_bytes(repr(sorted(hash_facts(self._facts_of(batch)).items())).encode())

    def compare(self, batch: Rows | None) -> None:
        """Finds and names the facts that differ. Collective. `batch` is None on a rank without one.

        Raises:
            ValueError: a list with an entry per row differs. Every rank raises it.
        """
        mine = None if batch is None else _told(batch, self._facts_of(batch))
        of_ranks = zip(self._channel.ranks, self._channel.all_gather_objects(mine), strict=True)
        known = {rank: told for rank, told in of_ranks if told is not None}
        paths = sorted({path for told in known.values() for path in told})
        differing = [path for path in paths if len({told.get(path, (0,))[0] for told in known.values()}) > 1]
        for path in differing:
            for rank in (rank for rank, told in known.items() if path in told and told[path].has_rows):
                raise ValueError(
                    f"{path or 'a batch'} is a list with an entry for each row of rank {rank}, and differs "
                    "between ranks: it would stay behind when its samples move. Make it integers in a "
                    "tensor, with one row per sample, or, for texts, a JaggedTensor of their bytes. "
                    f"{_IF_OF_RANK}"
                )
        self._differ.update(differing)
        if self._channel.rank == 0:
            texts = [_text(path, known) for path in differing]
            logger.warning(
                f"plain values in batches differ between ranks: {', '.join(texts)}. Such a value stays with "
                "its rank when samples move, so a rank may compute samples with the value of others. Compute "
                f"it in the forward, or put it into a tensor, with one row per sample. {_IF_OF_RANK}"
            )

    def _facts_of(self, batch: Rows) -> dict[str, Any]:
        return {path: value for path, value in batch.facts().items() if path not in self._differ}


def _told(batch: Rows, facts: Mapping[str, Any]) -> dict[str, _Told]:
    counts, hashes = (batch.num_rows, batch.num_samples), hash_facts(facts)
    return {
        path: _Told(hashes[path], f"{value!r:.40}", isinstance(value, PlainList) and len(value) in counts)
        for path, value in facts.items()
    }


def _text(path: str, known: Mapping[int, Mapping[str, _Told]]) -> str:
    """Returns a fact and two of its values, such as "max_len (20 on rank 0, 31 on rank 1)"."""
    values: dict[int, str] = {}
    for rank, told in known.items():
        fact = told.get(path)
        values.setdefault(fact.hashed if fact else 0, f"{fact.text if fact else 'none'} on rank {rank}")
    return f"{path} ({', '.join(list(values.values())[:2])})"


class Contents(NamedTuple):
    """Hashes of a rank's first batch, which tell whether ranks loaded the same.

    Attributes:
        ids: hash of the jagged fields, or of all fields if none is jagged.
        shared: hashes of the tensors that are declared as shared, by path.
        columns: hashes of the dense fields, by path, without those in which all rows are equal.
    """

    ids: int
    shared: dict[str, int]
    columns: dict[str, int]

    @staticmethod
    def of(batch: Rows) -> Contents:
        """Returns the hashes of a batch on the host."""
        hashes = batch.field_hashes()
        jagged = {name for name, value in batch.fields.items() if not isinstance(value, torch.Tensor)}
        ids = {name: hashed for name, hashed in hashes.items() if name in jagged} or hashes
        columns = {
            name: hashed
            for name, hashed in hashes.items()
            if isinstance(value := batch.fields[name], torch.Tensor) and not _is_constant(value)
        }
        return Contents(hash_bytes(repr(sorted(ids.items())).encode()), batch.shared_hashes(), columns)


def _is_constant(value: torch.Tensor) -> bool:
    """Returns whether all rows of a dense field are equal."""
    if not value.numel():
        return True
    rows = flattened(value).view(torch.uint8).view(len(value), -1)
    return bool((rows == rows[:1]).all())


def warn_of_contents(of_ranks: Mapping[int, Contents]) -> None:
    """Warns if ranks loaded the same samples, or data that all samples may share."""
    held = list(of_ranks.values())
    paths = dict.fromkeys(path for each in held for path in each.shared)
    if differ := [path for path in paths if len({each.shared.get(path) for each in held}) > 1]:
        logger.warning(
            f"declared as shared by all samples, but different between ranks: {', '.join(differ)}. They stay "
            "with their rank when samples move, which is right for records of a rank. Data of samples need a "
            "row per sample, or a JaggedTensor"
        )
    by_ids: dict[int, list[int]] = {}
    for rank, each in of_ranks.items():
        by_ids.setdefault(each.ids, []).append(rank)
    if same := [ranks for ranks in by_ids.values() if len(ranks) > 1]:
        logger.warning(
            f"{ranks_text(same[0])} loaded the same samples: divide the samples between ranks, as a "
            "DistributedSampler does. If ranks compute them together, as in tensor parallelism, balance "
            "among ranks that load different ones, with process_group="
        )
    elif alike := [
        path
        for path in (held[0].columns if len(held) > 1 else ())
        if len({each.columns.get(path) for each in held}) == 1
    ]:
        logger.warning(
            f"equal on all ranks, and so maybe shared by all samples: {', '.join(alike)}. Fields as long as "
            "the batch travel with its samples. If all samples share them, name them in the shuffler's "
            'shared_fields, or mark them with field(metadata={"per_sample": False})'
        )
