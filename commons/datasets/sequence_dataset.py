"""Division of a source's samples among ranks and batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..sequence_batch import BaseBatch
from .epoch_start import EpochStart
from .sample_source import PerEpochSource, SampleSource


class SequenceDataset(EpochStart, IterableDataset[BaseBatch]):
    """One rank's batches of a source's samples.

    An epoch has one global order of samples for any number of ranks. Each global step takes the next
    `batch_size × num_ranks` samples and deals them to the ranks in contiguous runs. In an incomplete last
    step, the ranks' numbers of samples differ by at most one. Every rank has the same number of batches, and
    every batch has `batch_size` rows, with padding rows last. With `single_rank`, only rank 0 has batches.

    Pass it to a `DataLoader` with `batch_size=None`. Its workers take turns by step, and persistent workers
    follow `set_epoch`, too.

    Args:
        source: samples, whose number must not change, because workers and other ranks would not notice. A
            `PerEpochSource` provides the samples of the current epoch.
        batch_size: rows per rank, at least 1.
        rank: this rank, in [0, num_ranks).
        num_ranks: number of ranks to divide the samples among.
        shuffle: whether each epoch permutes the samples, by `seed` and the epoch, instead of keeping the
            source's order.
        seed: seed of the order, at least 0.
        single_rank: whether rank 0 loads the samples of all ranks, in batches of `batch_size × num_ranks`
            rows, and the other ranks yield no batches.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        source: SampleSource,
        batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        single_rank: bool = False,
    ) -> None:
        super().__init__("start_sample", batch_size, rank, num_ranks, seed)
        self._source = source
        self._num_samples = len(source)
        self.shuffle = shuffle
        self._single_rank = single_rank
        self._compare(f"{self._num_samples} samples", f"shuffle={shuffle}")

    @property
    def loads_here(self) -> bool:
        """Whether this rank yields batches."""
        return self._rank == 0 or not self._single_rank

    @property
    def samples_per_step(self) -> int:
        """Number of samples of a complete global step, over all ranks."""
        return self._batch_size * self._num_ranks

    @property
    def num_samples(self) -> int:
        """Number of samples of a whole epoch, over all ranks.

        Raises:
            RuntimeError: the source's number of samples has changed since this dataset was made.
        """
        found = len(self._source)
        if found != self._num_samples:
            raise RuntimeError(
                f"the source has {found} samples, expected {self._num_samples}, as many as when the "
                "SequenceDataset was made: make another one, and another DataLoader, on all ranks"
            )
        return found

    def set_epoch(self, epoch: int, start_sample: int | None = None) -> None:
        """Sets the epoch of the iterations that begin from now on, and the number of samples each skips.

        `start_sample` counts samples of all ranks, so training can resume on any number of ranks. None skips
        no samples, and must not undo a `start_sample` with which no iteration has begun yet. Loaders that
        accelerate has prepared make such calls.

        Raises:
            TypeError: `epoch` or `start_sample` is not an integer.
            ValueError: a number is negative, or the epoch has fewer samples than `start_sample`.
            RuntimeError: None would undo a call, running workers cannot see it, or the source's size changed.
        """
        self._set(epoch, start_sample, self.num_samples)

    def __len__(self) -> int:
        """Returns the number of batches of an iteration on every rank that loads."""
        return self._num_batches(self._start)

    def _num_batches(self, start_sample: int) -> int:
        return -(-(self.num_samples - start_sample) // self.samples_per_step)

    def _batches(self, epoch: int, start: int) -> Iterator[BaseBatch]:
        self._begin(epoch, start)
        if not self.loads_here:
            return
        order = self._epoch_order(epoch)[start:]
        source = self._source
        if isinstance(source, PerEpochSource):
            source = source.for_epoch(epoch)
        rows = self.samples_per_step if self._single_rank else self._batch_size
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(first, self._num_batches(start), stride):
            step_samples = order[step * self.samples_per_step : (step + 1) * self.samples_per_step]
            if not self._single_rank:
                step_samples = np.array_split(step_samples, self._num_ranks)[self._rank]
            yield source.collate([source[int(index)] for index in step_samples], rows)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Returns the indices of an epoch's samples in order, over all ranks."""
        order = np.arange(self.num_samples)
        if self.shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(order)
        return order
