"""Which sample goes into which rank's which batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from commons.datasets.sample_source import PerEpochSource, SampleSource
from commons.sequence_batch import BaseBatch


class SequenceDataset(IterableDataset[BaseBatch]):
    """One rank's batches of a source's samples.

    An epoch has one global order of samples, whatever the number of ranks. Global step s takes the next
    `batch_size × num_ranks` samples of it and deals them to the ranks in contiguous runs; in the last step,
    if incomplete, the ranks' numbers of samples are within one of each other. Every rank has the same number
    of batches, and every batch `batch_size` rows, the padding last; `single_rank` makes it another division.

    Pass it to a `DataLoader` with `batch_size=None`; with workers, they take steps in turn.

    Args:
        source: the samples; of a `PerEpochSource` those of the epoch.
        batch_size: rows per rank, at least 1.
        rank: this rank, 0 to `num_ranks`, exclusive.
        num_ranks: ranks among which the samples are divided.
        shuffle: whether the order is a permutation, drawn from `seed` and the epoch, or the source's own.
        seed: at least 0.
        single_rank: whether rank 0 loads the samples of all ranks, in batches of `batch_size × num_ranks`
            rows, and the others give no batches.

    Raises:
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
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: expected at least 1")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank = {rank}: expected 0 to {num_ranks - 1}, as num_ranks = {num_ranks}")
        if seed < 0:
            raise ValueError(f"seed = {seed}: expected at least 0")
        self._source = source
        self._batch_size = batch_size
        self._rank = rank
        self._num_ranks = num_ranks
        self._shuffle = shuffle
        self._seed = seed
        self._single_rank = single_rank
        self._epoch = 0
        self._start_sample = 0

    @property
    def loads_here(self) -> bool:
        """Whether this rank gives batches."""
        return self._rank == 0 or not self._single_rank

    @property
    def samples_per_step(self) -> int:
        """Samples of a complete global step over all ranks."""
        return self._batch_size * self._num_ranks

    @property
    def num_samples(self) -> int:
        """Samples of a whole epoch over all ranks."""
        return len(self._source)

    def set_epoch(self, epoch: int, start_sample: int = 0) -> None:
        """Makes the next iteration that of `epoch`, without the first `start_sample` samples of its order.

        `start_sample` is counted over all ranks, so that training resumes on any number of them.

        Raises:
            ValueError: `epoch` is negative, or the epoch has fewer samples than `start_sample`.
        """
        if epoch < 0:
            raise ValueError(f"epoch = {epoch}: expected at least 0")
        if not 0 <= start_sample <= self.num_samples:
            raise ValueError(f"start_sample = {start_sample}: expected 0 to {self.num_samples}")
        self._epoch = epoch
        self._start_sample = start_sample

    def __len__(self) -> int:
        """Batches that an iteration gives, on every rank that loads."""
        return -(-(self.num_samples - self._start_sample) // self.samples_per_step)

    def __iter__(self) -> Iterator[BaseBatch]:
        if not self.loads_here:
            return
        order = self._epoch_order()
        source = self._source
        if isinstance(source, PerEpochSource):
            source = source.of_epoch(self._epoch)
        rows = self.samples_per_step if self._single_rank else self._batch_size
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(first, len(self), stride):
            of_all_ranks = order[step * self.samples_per_step : (step + 1) * self.samples_per_step]
            samples = [source[int(index)] for index in self._rank_share(of_all_ranks)]
            yield source.collate(samples, rows)

    def _epoch_order(self) -> np.ndarray:
        """Indices of the samples that are still to come in this epoch, over all ranks."""
        order = np.arange(len(self._source))
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        return order[self._start_sample :]

    def _rank_share(self, indices: np.ndarray) -> np.ndarray:
        """This rank's run of one global step's samples."""
        if self._single_rank:
            return indices
        smallest, larger_runs = divmod(len(indices), self._num_ranks)
        start = self._rank * smallest + min(self._rank, larger_runs)
        return indices[start : start + smallest + (self._rank < larger_runs)]
