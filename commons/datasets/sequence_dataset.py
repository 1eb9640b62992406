"""Division of a source's samples among ranks and batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Dataset, Sampler

from ..epoch_start import EpochStart
from ..sequence_batch import BaseBatch
from .sample_source import PerEpochSource, SampleSource

Step = tuple[int, int]  # a global step: its epoch, and the number of samples in the epoch before it


class SequenceDataset(EpochStart, Dataset[BaseBatch]):
    """One rank's batches of a source's samples.

    An epoch has one global order of samples for any number of ranks. Each global step takes the next
    `batch_size × num_ranks` samples and deals them to the ranks in contiguous runs. In an incomplete last
    step, the ranks' numbers of samples differ by at most one. Every rank has the same number of batches, and
    every batch has `batch_size` rows, with padding rows last. With `single_rank`, only rank 0 has batches.

    Iterate over it, or over `DataLoader(dataset, batch_size=None, sampler=dataset.sampler)`, for workers.

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
        self._loaded: tuple[int, SampleSource, np.ndarray] | None = None  # an epoch, its samples, their order
        self._compare(f"{self._num_samples} samples", f"shuffle={shuffle}")

    @property
    def sampler(self) -> Sampler[Step]:
        """The steps that this rank loads, for a `DataLoader`. It follows `set_epoch`."""
        return _Steps(self)

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
            RuntimeError: None would undo a call, or the source's size changed.
        """
        self._set(epoch, start_sample, self.num_samples)

    def __len__(self) -> int:
        """Returns the number of batches of an iteration on every rank that loads."""
        return -(-(self.num_samples - self._start) // self.samples_per_step)

    def _batches(self, epoch: int, start: int) -> Iterator[BaseBatch]:
        return map(self.__getitem__, self._steps(epoch, start))

    def _steps(self, epoch: int, start: int) -> Iterator[Step]:
        self._begin(epoch, start)
        if self.loads_here:
            yield from ((epoch, first) for first in range(start, self.num_samples, self.samples_per_step))

    def __getitem__(self, step: Step) -> BaseBatch:
        """Returns this rank's batch of a step that `sampler` yields.

        Raises:
            TypeError: `step` is something else, as of a `DataLoader` without `sampler`.
        """
        if not isinstance(step, tuple):
            raise TypeError(f"step = {step!r}: expected one of dataset.sampler: pass it to the DataLoader")
        epoch, first = step
        if self._loaded is None or self._loaded[0] != epoch:
            source = self._source
            source = source.for_epoch(epoch) if isinstance(source, PerEpochSource) else source
            self._loaded = epoch, source, self._epoch_order(epoch)
        _, source, order = self._loaded
        rows, samples = self._batch_size, order[first : first + self.samples_per_step]
        if self._single_rank:
            rows = self.samples_per_step
        else:
            samples = np.array_split(samples, self._num_ranks)[self._rank]
        return source.collate([source[int(index)] for index in samples], rows)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Returns the indices of an epoch's samples in order, over all ranks."""
        order = np.arange(self.num_samples)
        if self.shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(order)
        return order


class _Steps(Sampler[Step]):
    """The steps of a dataset's next iteration."""

    def __init__(self, dataset: SequenceDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Step]:
        return self._dataset._steps(self._dataset._epoch, self._dataset._start)

    def __len__(self) -> int:
        return len(self._dataset)
