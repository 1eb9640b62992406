"""Batches whose ranks have nearly the same load from the start."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from commons.partition import refined
from commons.partition.workloads import as_workloads, check_count


class BucketSampler(Sampler[list[int]]):
    """One rank's batches of sample indices, balanced among the ranks when they are loaded.

    No sample has to change its rank afterwards, but what each costs must be known before the first is
    loaded.

    In an epoch every sample comes once. It is the same epoch whichever rank computes it: `batch_size ×
    num_ranks` samples make a global step, which `commons.partition.refined` divides among the ranks, in
    numbers within one of each other. The samples that fill no step are drawn from all of them, so that
    they are not always the longest, and make the last one. Where these are fewer than the ranks, some
    ranks' last batch is an empty list, of which `SampleSource.collate` makes padding rows.

    With one bucket, the global steps are those of `SequenceDataset` with `shuffle` and the same seed:
    plain shuffling, balanced without an exchange. A step whose largest sample outweighs a rank's share
    stays unbalanced.

    With more, the samples of full steps are sorted by workload and cut into buckets of equal numbers,
    shuffled within each, laid one behind the other and cut into steps (one on a boundary has samples of
    both sides), which are shuffled. Large samples then come together, which balances what no single step
    could. But **it changes training**: a step is a biased draw, of samples that cost alike, some steps
    of long sequences and some of short ones, and one may cost several times as much as the mean step,
    and needs the memory for it.

    Pass it to a `DataLoader` as `batch_sampler`, with `functools.partial(source.collate,
    batch_size=batch_size)` as `collate_fn`.

    Args:
        workloads: `[samples]`, non-negative: what each sample costs, in any unit, or its length; the
            same on all ranks.
        batch_size: rows per rank, at least 1.
        rank: this rank, 0 to `num_ranks`, exclusive.
        num_ranks: ranks among which the samples are divided.
        num_buckets: at least 1; from about the number of steps on, a step has the likest samples it can.
        seed: at least 0.

    Raises:
        ValueError: a value is out of range, or `workloads` is not one finite number per sample.
    """

    def __init__(
        self,
        workloads: ArrayLike,
        batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        num_buckets: int = 8,
        seed: int = 0,
    ) -> None:
        check_count("batch_size", batch_size)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank = {rank}: expected 0 to {num_ranks - 1}, as num_ranks = {num_ranks}")
        check_count("num_buckets", num_buckets)
        if seed < 0:
            raise ValueError(f"seed = {seed}: expected at least 0")
        self._workloads = as_workloads(workloads)
        self._step_size = batch_size * num_ranks
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_buckets = num_buckets
        self._seed = seed
        self._epoch = 0
        self._start_step = 0

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch, an incomplete one included."""
        return -(-len(self._workloads) // self._step_size)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Makes the next iteration that of `epoch`, without its first `start_step` steps.

        An epoch resumed so, on as many ranks and with the same `batch_size`, is as if uninterrupted.

        Raises:
            ValueError: `epoch` is negative, or the epoch has fewer steps than `start_step`.
        """
        if epoch < 0:
            raise ValueError(f"epoch = {epoch}: expected at least 0")
        if not 0 <= start_step <= self.num_steps:
            raise ValueError(f"start_step = {start_step}: expected 0 to {self.num_steps}")
        self._epoch = epoch
        self._start_step = start_step

    def __len__(self) -> int:
        """Batches that an iteration gives, on every rank."""
        return self.num_steps - self._start_step

    def __iter__(self) -> Iterator[list[int]]:
        order = self._epoch_order()
        for step in range(self._start_step, self.num_steps):
            samples = order[step * self._step_size : (step + 1) * self._step_size]
            share = refined(self._workloads[samples], self._num_ranks)[self._rank]
            yield samples[share].tolist()

    def _epoch_order(self) -> np.ndarray:
        """int64 `[samples]`: the global steps of the whole epoch, one behind the other."""
        rng = np.random.default_rng((self._seed, self._epoch))
        order = rng.permutation(len(self._workloads))
        if self._num_buckets == 1:
            return order
        in_full_steps, rest = np.split(order, [len(order) - len(order) % self._step_size])
        by_index = np.sort(in_full_steps)
        by_workload = by_index[np.argsort(self._workloads[by_index], kind="stable")]
        buckets = np.array_split(by_workload, self._num_buckets)
        shuffled = np.concatenate([rng.permutation(bucket) for bucket in buckets])
        steps = rng.permutation(shuffled.reshape(-1, self._step_size))
        return np.concatenate([steps.ravel(), rest])
