"""The planning gather: one collective that tells every rank about the rows of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..sequence_batch.fields import bytes_on_host, hash_bytes
from ..sequence_batch.rows import Rows, hashes_of
from ..sequence_batch.tree import is_list
from .counting import Counted
from .extension import Extension
from .plan import Format, RowTable
from .ranks import Channel, from_bytes, ranks_text, to_bytes

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


class PlanGather:
    """Gathers the rows of all ranks over a group, and raises a failure of one rank on all of them.

    In the first call, ranks agree on the format, and on the number of rows that a gather carries per rank.
    A later call takes one all-gather of equal sizes. If a rank has more rows, or wider numbers, all ranks
    make room and gather again. While some ranks have no batch, one more gather tells whether their spare rows
    are up to date.

    Args:
        channel, agrees: channels of the ranks whose rows are gathered, and of the ranks that agree on the
            format, which are the same or all ranks of the job.
        peers: channel of the ranks that compute the same samples as this one.
        extensions: the shuffler's extensions.
        moves: whether samples may leave their ranks, so that ranks compare what stays behind.

    Attributes:
        format: the format that the ranks have agreed on. None before the first batch.
        bins: the bins of a `RowTable`, if the model gathers the batches of ranks that compute together.
    """

    def __init__(
        self, channel: Channel, agrees: Channel, peers: Channel, extensions: Sequence[Extension], moves: bool
    ) -> None:
        self._channel, self._agrees, self._peers, self._extensions = channel, agrees, peers, extensions
        self._moves, self._facts = moves, RankFacts(channel)
        self._capacity, self._is_wide = 0, False  # rows that a gather carries per rank, and their width
        self._spare: Rows | None = None
        self._is_pinned = False
        self.format: Format | None = None
        self.bins: np.ndarray | None = None

    def gather(
        self, counted: Counted | None, failure: Exception | None, posts: np.ndarray
    ) -> tuple[RowTable, np.ndarray]:
        """Gathers the rows and the posts, `[ranks]`, of all ranks. Collective, even without a batch.

        Args:
            counted: this rank's rows. None means that its loader has ended, or that it has a `failure`.
            posts: numbers for the other ranks, `[1]`, with a field for each extension.

        Raises:
            ValueError: the formats of batches differ between ranks or steps.
            TypeError: a rank without a batch needs data of another rank's batch that does not pickle.
            Exception: the failure of the first rank that has one. Every rank raises it.
        """
        if self.format is None:
            self._agree(counted, failure, posts.dtype.itemsize)
        if self.format is None:  # no rank has ever had a batch
            num_ranks = self._channel.num_ranks
            return RowTable.empty(num_ranks), np.zeros(num_ranks, dtype=posts.dtype)
        facts = 0
        try:
            if counted is not None:
                self.format.check_same(None, self._channel.ranks[self._channel.rank], counted.format)
                facts = self._facts.hash_of(counted.batch) if self._moves else 0
        except Exception as error:
            failure = error
        messages = self._send(counted, failure, posts, facts)
        most, is_wide = int(messages["num_rows"].max()), bool(messages["is_wide"].any())
        if most > self._capacity or (is_wide and not self._is_wide):
            self._capacity, self._is_wide = max(most, self._capacity), is_wide or self._is_wide
            messages = self._send(counted, failure, posts, facts)
        if messages["failed"].any():
            self._channel.all_gather_objects(None, failure)
        has_batch = messages["num_rows"] > 0
        if len({*messages["facts"][has_batch].tolist()}) > 1:
            self._facts.compare(counted and counted.batch)
        if has_batch.any() and not has_batch.all():
            self._renew_spare(counted, has_batch)
        return self.format.table(messages), messages["posts"].copy()

    def spare_row(self) -> Rows:
        """Returns a copy of the row that this rank computes in a step without samples; see `_row_of`.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        if self._spare is None:
            raise RuntimeError("no rank of the group has had a batch yet, so its fields are unknown")
        row = self._spare.copy()  # a model may modify its input in place
        return row.pin_memory() if self._is_pinned else row

    def _send(
        self, counted: Counted | None, failure: Exception | None, posts: np.ndarray, facts: int
    ) -> np.ndarray:
        """Gathers the messages of all ranks. A message leaves out rows for which it has no room."""
        assert self.format is not None  # ranks have agreed
        sent = np.zeros(1, dtype=self.format.message(posts.dtype, self._capacity, self._is_wide))
        sent["failed"], sent["facts"], sent["posts"] = failure is not None, facts, posts
        if counted is not None and failure is None:
            sent["num_rows"], sent["num_real"] = counted.batch.num_rows, len(counted.numbers)
            sent["is_wide"] = counted.is_wide
            if counted.batch.num_rows <= self._capacity and counted.is_wide <= self._is_wide:
                sent["padding_lengths"] = counted.padding_lengths
                sent["rows"][0, : len(counted.numbers)] = counted.numbers
        return self._channel.all_gather(sent)[:, 0]

    def _agree(self, counted: Counted | None, failure: Exception | None, num_posted: int) -> None:
        """Agrees on the format with all ranks, and sets `format` unless no rank has a batch. Collective."""
        mine, contents, num_rows = None, None, 0
        if counted is not None:
            try:
                batch, num_rows = counted.batch.on_host(), counted.batch.num_rows
                self._spare, self._is_pinned = _row_of(counted), counted.batch.is_pinned
                agreed = {of.name: of.agree(batch.batch, counted.format) for of in self._extensions}
                contents = contents_of(batch) if self._moves else None
                mine = replace(counted.format, agreed=agreed)
            except Exception as error:
                failure = error
        gathers, fault = self._compare_bin(counted)
        agrees, names, told = self._agrees, self._agrees.ranks, (self._peers.ranks, gathers)
        sent = agrees.all_gather_objects((mine, num_rows, num_posted, contents, *told), failure or fault)
        formats, rows_of_each, posts, loaded, bins, do_gather = zip(*sent, strict=True)
        bin_of = dict(zip(names, bins, strict=True))
        self.bins = np.array([bin_of[rank][0] for rank in self._channel.ranks]) if any(do_gather) else None
        for rank, num in zip(names, posts, strict=True):
            if num != posts[0]:
                raise ValueError(
                    f"extensions of the ranks {names[0]} and {rank} have restored different states; restore "
                    "them on every rank"
                )
        has_batch = np.array([of_rank is not None for of_rank in formats])
        if not has_batch.any():
            return
        first = int(has_batch.argmax())
        for rank in np.flatnonzero(has_batch).tolist():
            formats[first].check_same(names[first], names[rank], formats[rank])
        if self._channel.rank == 0:  # of the ranks that exchange, not of all that agree
            of_ranks = dict(zip(names, loaded, strict=True))
            warn_of_contents({rank: held for rank in self._channel.ranks if (held := of_ranks[rank])})
        if not has_batch.all():
            self._get_spare(agrees, counted, first)
        self._capacity, self.format = max(rows_of_each), formats[first]

    def _compare_bin(self, counted: Counted | None) -> tuple[bool, ValueError | None]:
        """Returns whether ranks that compute together load different batches; an error if they must not."""
        fields = {} if counted is None or self._peers.num_ranks == 1 else counted.batch.on_host().fields
        hashes, ranks = self._peers.all_gather_objects(hashes_of(fields)), self._peers.ranks
        num_here = len({*ranks} & {*self._channel.ranks})
        if all(hashed == hashes[0] for hashed in hashes):
            fits = num_here == 1 or not self._moves or not any(hashes)
            problem = "the same batch: balance among the data-parallel group, with process_group"
            return False, None if fits else ValueError(
                f"{ranks_text(ranks)} compute together and load {problem}"
            )
        alone = [extension.name for extension in self._extensions if extension.computes_alone]
        fits = num_here == len(ranks) and not alone
        return True, None if fits else ValueError(
            f"{ranks_text(ranks)} compute together and load different batches: load the same ones or, if the "
            f"model gathers them, balance among all these ranks{f', without {alone[0]}' if alone else ''}"
        )

    def _renew_spare(self, counted: Counted | None, has_batch: np.ndarray) -> None:
        """Replaces spare rows if what stays with a batch, such as shared tensors, has changed. Collective."""
        rows = self._spare if counted is None else counted.batch.on_host()
        rest = 0 if rows is None else rows.hash_of_rest()
        hashes, sender = self._channel.all_gather(np.array([rest]))[:, 0], int(has_batch.argmax())
        if (hashes[~has_batch] != hashes[sender]).any():
            self._get_spare(self._channel, counted, sender)

    def _get_spare(self, channel: Channel, counted: Counted | None, sender: int) -> None:
        """Replaces the spare row of a rank without a batch by one from the rank `sender`. Collective."""
        sent, failure = None, None
        if counted is not None and channel.rank == sender:
            try:
                sent = to_bytes(_row_of(counted))
            except Exception as error:
                failure = TypeError(
                    f"a batch of rank {channel.ranks[sender]} does not pickle ({error}), and a rank that has "
                    "none needs it for its type and what its samples share; keep functions and handles out "
                    "of batches"
                )
        sent = channel.all_gather_objects(sent, failure)[sender]
        if counted is None:
            self._spare = from_bytes(sent)


def _row_of(counted: Counted) -> Rows:
    """Returns a padding row if batches know it, or else the row with the fewest elements, on the host."""
    batch = counted.batch.on_host()
    elements = counted.numbers["key_lengths"].sum(1, dtype=np.int64)
    row = np.zeros(0, dtype=np.int64) if batch.pads else elements.argmin(keepdims=True)
    return batch.view(batch.select([batch.packed()], row, 1))
