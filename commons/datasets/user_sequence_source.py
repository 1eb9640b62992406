"""Samples of users' sequences, split by time into training and evaluation."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np

from ..argument_checks import require, require_at_least
from .embedding_args import DynamicEmbeddingArgs, EmbeddingArgs
from .hstu_batch import HSTUSample, HSTUSource, SequenceDatasetSpec
from .user_sequences import SequencesMeta, UserSequences


class UserSequenceSource(HSTUSource):
    """Samples of users, from the training or the evaluation part of their events.

    Of a user's n ≥ 2 events, the newest floor(n × eval_fraction), but at least one, are held out. With
    `num_held_out`, that many are held out instead, but at most n − 1. A user's only event is for training. A
    label is the action id − 1: a class, or a bit mask of tasks.

    - A training sample has the events that are not held out, and every item has a label. With candidates, the
      newest min(max_num_candidates, items − 1) items are candidates, and only they have labels.
    - A validation sample has all events except the newest, and only held-out items have labels.
    - An evaluation sample has all events, and only held-out items have labels. With candidates, the newest
      min(max_num_candidates, held-out items, items − 1) items are candidates, and only they have labels.
      Users with one event have no evaluation sample.

    So no evaluation label occurs in training, as a label or an input. After the split, each sample keeps only
    its newest `max_history_seqlen` items. A user has one sample, unless `window_step` is given.

    Args:
        sequences: the users' events.
        split: "train", "validation", or "eval". With `num_held_out=2`, the second-newest event validates, and
            the newest one tests.
        max_history_seqlen: largest number of items per sample, history and candidates together.
        max_num_candidates: largest number of candidates per sample. 0 means that samples have none.
        eval_fraction: held-out share of a user's events, between 0 and 1.
        num_held_out: number of held-out events per user. None means the share `eval_fraction`.
        window_step: number of events between the ends of a user's training samples, which go back from the
            newest event until every event is in one. None means one sample per user, with the newest events.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        sequences: UserSequences,
        split: Literal["train", "validation", "eval"],
        max_history_seqlen: int,
        max_num_candidates: int = 0,
        eval_fraction: float = 0.2,
        num_held_out: int | None = None,
        window_step: int | None = None,
    ) -> None:
        require(split in ("train", "validation", "eval"), "split", split, "train, validation, or eval")
        require_at_least(1, "max_history_seqlen", max_history_seqlen)
        require_at_least(0, "max_num_candidates", max_num_candidates)
        require(0 < eval_fraction < 1, "eval_fraction", eval_fraction, "a value between 0 and 1")
        is_count = num_held_out is None or num_held_out >= 1
        require(is_count, "num_held_out", num_held_out, "at least 1, or None for a share")
        expected = f"1 to max_history_seqlen = {max_history_seqlen}, or None"
        is_step = window_step is None or 1 <= window_step <= max_history_seqlen
        require(is_step, "window_step", window_step, expected)
        self.spec = _spec(sequences.meta, max_history_seqlen, max_num_candidates)
        self._sequences = sequences
        num_events = np.diff(sequences.offsets)
        if num_held_out is None:
            held_out = np.maximum((num_events * eval_fraction).astype(np.int64), 1)
        else:
            held_out = np.full_like(num_events, num_held_out)
        held_out = np.minimum(held_out, num_events - 1)
        # Events that a user's samples leave out, and items before them that they predict, [users] each.
        left_out = held_out if split == "train" else np.full_like(held_out, int(split == "validation"))
        labeled = num_events - left_out if split == "train" else held_out - left_out
        num_windows = (labeled > 0).astype(np.int64)
        if split == "train" and window_step is not None:
            overlap = max_history_seqlen - window_step
            num_windows = np.maximum(-(-(labeled - overlap) // window_step), 1)
        self._users = np.repeat(np.arange(len(num_events)), num_windows)
        windows = np.arange(len(self._users)) - (num_windows.cumsum() - num_windows)[self._users]
        # Events of each sample, [samples] each. The first window has the user's newest events.
        starts = sequences.offsets[self._users]
        self._ends = starts + (num_events - left_out)[self._users] - windows * (window_step or 0)
        self._starts = np.maximum(starts, self._ends - max_history_seqlen)
        self._num_labels = np.minimum(labeled[self._users], self._ends - self._starts)

    @cached_property
    def catalogue(self) -> np.ndarray:
        """All item ids that occur, including held-out items: int64 `[items]`, ascending, maybe with gaps."""
        return np.unique(self._sequences.items).astype(np.int64)

    def __len__(self) -> int:
        return len(self._users)

    @property
    def num_items(self) -> np.ndarray:
        """Number of items of each sample, int64 `[samples]`."""
        return self._ends - self._starts

    def __getitem__(self, index: int) -> HSTUSample:
        user, start, end = (int(of[index]) for of in (self._users, self._starts, self._ends))
        num_items, num_labels, num_candidates = end - start, int(self._num_labels[index]), 0
        if self.spec.max_num_candidates:
            num_candidates = min(self.spec.max_num_candidates, num_labels, num_items - 1)
            num_labels = num_candidates
        actions = self._sequences.actions[start:end].astype(np.int64)
        return HSTUSample(
            contextual={name: ids[user : user + 1] for name, ids in self._sequences.contextual.items()},
            items=self._sequences.items[start:end].astype(np.int64),
            actions=actions,
            labels=actions[num_items - num_labels :] - 1,
            num_candidates=num_candidates,
        )


def _spec(meta: SequencesMeta, max_history_seqlen: int, max_num_candidates: int) -> SequenceDatasetSpec:
    large = (meta.item_feature_name, "user_id")
    max_seqlens = dict.fromkeys(meta.contextual_feature_names, 1)
    max_seqlens |= dict.fromkeys((meta.item_feature_name, meta.action_feature_name), max_history_seqlen)
    return SequenceDatasetSpec(
        contextual_feature_names=tuple(meta.contextual_feature_names),
        item_feature_name=meta.item_feature_name,
        action_feature_name=meta.action_feature_name,
        feature_to_max_seqlen=max_seqlens,
        tables=tuple(
            DynamicEmbeddingArgs([name], name, size)
            if name in meta.unbounded_feature_names
            else EmbeddingArgs([name], name, size, "model_parallel" if name in large else "data_parallel")
            for name, size in meta.vocab_sizes.items()
        ),
        max_num_candidates=max_num_candidates,
        num_classes=meta.num_classes,
        positive_class=meta.positive_class,
        num_tasks=meta.num_tasks,
    )
