"""Compares between ranks what stays with them when samples move, and what they loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..sequence_batch.row_schema import bytes_on_host, hash_bytes
from ..sequence_batch.rows import Rows, hashes_of
from ..sequence_batch.tree import is_list
from .channel import Channel
from .rank_group import ranks_text

logger = logging.getLogger(__name__)
_DECLARE = (
    "name it in the shuffler's shared_fields, or mark the field of a BaseBatch with "
    'field(metadata={"per_sample": False})'
)
_FEW = 4  # fewer samples, or different rows of a field, may be equal by chance
# Hashes of a rank's first batch, by path: the fields of more than a few different values that are jagged (or
# all of them, if none is; none of few samples), the tensors that are declared as shared, and all such fields.
Contents = tuple[dict[str, int], dict[str, int], dict[str, int]]


class RankFacts:
    """Compares the plain values of batches, such as a longest length, and warns once of each that differs.

    Ranks compare a hash of all values in each step, and gather the values only if the hashes differ.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._differ: set[str] = set()  # paths that are known to differ, the same on all ranks

    def _facts_of(self, batch: Rows) -> dict[str, Any]:
        return {path: value for path, value in batch.facts().items() if path not in self._differ}

    def hash_of(self, batch: Rows) -> int:
        """Returns a hash of the facts that are not yet known to differ."""
        return hash_bytes(repr(sorted(hashes_of(self._facts_of(batch)).items())).encode())

    def compare(self, batch: Rows | None) -> None:
        """Finds and names the facts that differ. Collective. `batch` is None on a rank without one.

        Raises:
            ValueError: a list with an entry per row differs. Every rank raises it.
        """
        facts = {} if batch is None else self._facts_of(batch)
        counts = () if batch is None else (batch.num_rows, batch.num_samples)
        told = {
            path: (hashed, f"{facts[path]!r:.40}", is_list(facts[path]) and len(facts[path]) in counts)
            for path, hashed in hashes_of(facts).items()
        }
        gathered = self._channel.all_gather_objects(None if batch is None else told)
        known = {rank: of for rank, of in zip(self._channel.ranks, gathered, strict=True) if of is not None}
        texts = {}
        for path in sorted({path for of_rank in known.values() for path in of_rank}):
            facts_of = {rank: of_rank.get(path, (0, "nothing", False)) for rank, of_rank in known.items()}
            if len({hashed for hashed, _, _ in facts_of.values()}) == 1:
                continue
            for rank in (rank for rank, (_, _, has_rows) in facts_of.items() if has_rows):
                raise ValueError(
                    f"{path or 'a batch'} is a list with an entry for each row of rank {rank}, and differs "
                    "between ranks: make it integers in a tensor, with one row per sample, or, for texts, a "
                    f"JaggedTensor of their bytes. If it belongs to the rank, {_DECLARE}"
                )
            (first, (hashed, text, _)), *others = facts_of.items()
            other, other_text = next((rank, of[1]) for rank, of in others if of[0] != hashed)
            texts[path] = f"{path} ({text} on rank {first}, {other_text} on rank {other})"
        self._differ |= texts.keys()
        if self._channel.rank == 0:
            logger.warning(
                f"plain values in batches differ between ranks: {', '.join(texts.values())}. They stay when "
                "samples move: compute such a value in the forward, or make it a tensor with one row per "
                f"sample. If it belongs to the rank, {_DECLARE}"
            )


def contents_of(batch: Rows) -> Contents:
    """Returns the hashes of a batch on the host, by which ranks find out whether they loaded the same."""
    hashes = hashes_of(batch.fields)
    dense = {path: value for path, value in batch.fields.items() if isinstance(value, torch.Tensor)}
    values = {path: dense[path] if path in dense else batch.fields[path].values() for path in hashes}
    differ = {path: hashes[path] for path in sorted(values) if _num_different(values[path]) >= _FEW}
    ids = {path: hashed for path, hashed in differ.items() if path not in dense} or differ
    return ids if batch.num_samples >= _FEW else {}, hashes_of(batch.shared_leaves), differ


def _num_different(value: torch.Tensor) -> int:
    """Returns the number of different rows of a tensor."""
    if not value.numel():
        return min(len(value), 1)
    return len({row.tobytes() for row in bytes_on_host(value).reshape(len(value), -1)})


def warn_of_contents(of_ranks: Mapping[int, Contents]) -> None:
    """Warns if ranks loaded the same samples, or data that all samples may share."""
    ids, shared, columns = ([of_rank[kind] for of_rank in of_ranks.values()] for kind in range(3))
    every = dict.fromkeys(path for of_rank in shared for path in of_rank)
    if differ := [path for path in every if len({of_rank.get(path) for of_rank in shared}) > 1]:
        logger.warning(
            f"declared as shared by all samples, but different between ranks: {', '.join(differ)}. They stay "
            "when samples move: data of samples need a row per sample, or a JaggedTensor"
        )
    same = [rank for rank, of_rank in zip(of_ranks, ids, strict=True) if of_rank and ids.count(of_rank) > 1]
    alike = [path for path in (columns or [{}])[0] if len({of_rank.get(path) for of_rank in columns}) == 1]
    if same:
        hint = f". If only {', '.join(alike)} is the same, because all samples share it, {_DECLARE}"
        logger.warning(
            f"{ranks_text(same)} loaded the same samples: divide the samples between ranks, as a "
            "DistributedSampler does. If ranks compute them together, as in tensor parallelism, balance "
            f"among ranks that load different ones, with process_group={hint if alike else ''}"
        )
    elif alike and len(of_ranks) > 1:
        logger.warning(
            f"equal on all ranks, and as long as the batch: {', '.join(alike)}. Such a field travels with "
            f"the samples. If all samples share it, {_DECLARE}"
        )
