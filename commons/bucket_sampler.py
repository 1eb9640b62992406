"""A sampler that balances batches among the ranks when they are loaded, without an exchange."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from .argument_checks import require
from .epoch_start import EpochStart
from .partition import refined
from .partition.workloads import as_workloads, check_count
from .sequence_batch.fields import hash_bytes

__all__ = ["BucketSampler"]

logger = logging.getLogger(__name__)


class BucketSampler(EpochStart, Sampler[list[int]]):
    """One rank's batches of sample indices, balanced among the ranks when they are loaded.

    Samples never change ranks afterward, but the cost of each sample must be known before loading starts.

    An epoch uses every sample once, and is the same on all ranks. `batch_size × num_ranks` samples make a
    global step, which `partition.refined` divides among the ranks. The ranks' numbers of samples
    differ by at most one. Leftover samples that do not fill a step form a last step, or are treated as `last`
    says. They are drawn from all samples, so they are not always the longest.

    With one bucket, the global steps are those of plain shuffling, balanced without an exchange. A step whose
    largest sample outweighs a rank's share stays unbalanced.

    With more buckets, the samples of full steps are sorted by workload and divided into equal buckets. Each
    bucket is shuffled. The concatenated buckets are divided into steps, and the steps are shuffled. A step at
    a boundary has samples of two buckets. Large samples then share steps, which balances samples that are too
    large for any random step. But **this changes training**: a step is a biased draw of samples with similar
    cost, so some steps have long sequences and others short ones. A step may cost several times the mean
    step, and needs the memory for it.

    With groups, an epoch shuffles groups instead of samples, and the samples of a group stay consecutive.
    Groups are then sorted into buckets by the mean workload of their samples. Within a step,
    `rebalance_groups` of the extension `sample_groups` keeps groups together where balance allows it. A group
    that falls into two steps or two buckets counts as two groups.

    Pass the sampler to a `DataLoader` as `batch_sampler`.

    Provisional: may change in a minor version.

    Args:
        workloads: `[samples]` non-negative costs in any unit, or lengths. They are equal on all ranks.
        batch_size: rows per rank, at least 1.
        rank: this rank, in [0, num_ranks).
        num_ranks: number of ranks to divide the samples among.
        num_buckets: number of buckets, at least 1. Beyond about one bucket per step, more make no difference.
        seed: seed of the order, at least 0.
        groups: `[samples]` integers, equal on all ranks. Samples with the same number, such as the samples of
            a user, belong together on one rank. Samples with negative numbers have no group. None means no
            groups.
        last: treatment of leftover samples. "keep" makes them a step. If they are fewer than the ranks, some
            ranks get an empty list as their batch. The collate function must turn it into padding rows;
            torch's `default_collate` fails on it. "drop" leaves them out, different samples each epoch.
            "repeat" adds the first samples of the epoch again, as `DistributedSampler` does, until all ranks
            have the same number. None means "keep", with a warning if a batch will be empty.

    Raises:
        TypeError: `batch_size`, `rank`, `num_ranks`, or `seed` is not an integer.
        ValueError: a value is out of range, `workloads` is not one finite number per sample, `groups` is not
            one integer per sample, or `last` would drop all samples.
    """

    shuffle = True

    def __init__(
        self,
        workloads: ArrayLike,
        batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        num_buckets: int = 8,
        seed: int = 0,
        groups: ArrayLike | None = None,
        last: Literal["keep", "drop", "repeat"] | None = None,
    ) -> None:
        super().__init__("start_step", batch_size, rank, num_ranks, seed)
        check_count("num_buckets", num_buckets)
        self._workloads = as_workloads(workloads).copy()  # the caller's array may change
        self._group_of = None
        if groups is not None:
            from .extensions.sample_groups.groups import number_groups  # only callers with groups need it

            self._group_of = number_groups(groups, len(self._workloads))
        self._step_size = self._batch_size * self._num_ranks
        self._num_buckets = num_buckets
        self._last = "keep" if last is None else last
        self._check_last(is_given=last is not None)
        numbers = [self._workloads, *([] if self._group_of is None else [self._group_of])]
        costs = hash_bytes(b"".join(each.tobytes() for each in numbers))
        self._compare(f"{len(self._workloads)} samples", f"costs and groups of hash {costs:x}")

    def _check_last(self, is_given: bool) -> None:
        last, rest = self._last, len(self._workloads) % self._step_size
        require(last in ("keep", "drop", "repeat"), "last", last, '"keep", "drop" or "repeat"')
        if last == "drop" and rest and not self.num_steps:
            raise ValueError(
                f'last="drop" drops all {rest} samples: expected at least {self._step_size}, to fill a step'
            )
        # Only the loader knows which collate function gets the batches.
        if not is_given and 0 < rest < self._num_ranks and self._rank == 0:
            logger.warning(
                f"{len(self._workloads)} samples leave {rest} for the last step of {self._num_ranks} ranks, "
                "so the collate function gets an empty list on the others, on which torch's default_collate "
                'fails: pass last="drop" or last="repeat", or last="keep" if yours returns an empty batch'
            )

    @property
    def num_steps(self) -> int:
        """Number of steps of a whole epoch, including an incomplete last step unless `last` drops it."""
        full, rest = divmod(len(self._workloads), self._step_size)
        return full + (rest > 0 and self._last != "drop")

    @property
    def batch_size(self) -> int:
        """Rows per rank, for a sampler that serves a single rank.

        With several ranks, reading it is an error. Tools such as accelerate's `prepare` read it to divide a
        sampler's batches among ranks, but these batches are already divided.

        Raises:
            RuntimeError: the sampler serves several ranks.
        """
        if self._num_ranks > 1:
            raise RuntimeError(
                f"these are the batches of rank {self._rank} alone, as num_ranks = {self._num_ranks}. What "
                "reads batch_size divides them among ranks once more, and loses samples: iterate over the "
                "DataLoader itself instead of passing it to accelerate's prepare or the like"
            )
        return self._batch_size

    def set_epoch(self, epoch: int, start_step: int | None = None) -> None:
        """Sets the epoch of the iterations that begin from now on, and the number of steps each skips.

        With the same number of ranks and the same `batch_size`, this resumes an epoch exactly. None skips no
        steps, and must not undo a `start_step` with which no iteration has begun yet. Loaders that accelerate
        has prepared make such calls.

        Raises:
            TypeError: `epoch` or `start_step` is not an integer.
            ValueError: a number is negative, or the epoch has fewer steps than `start_step`.
            RuntimeError: None would undo an earlier call.
        """
        self._set(epoch, start_step, self.num_steps)

    def __len__(self) -> int:
        """Returns the number of batches of an iteration, which is the same on every rank."""
        return self.num_steps - self._start

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        self._begin(epoch, start)
        order = self._epoch_order(epoch)
        for step in range(start, self.num_steps):
            samples = order[step * self._step_size : (step + 1) * self._step_size]
            yield samples[self._partition(samples)[self._rank]].tolist()

    def _partition(self, samples: np.ndarray) -> list[np.ndarray]:
        """Divides a global step among the ranks. Returns each rank's positions in `samples`."""
        workloads = self._workloads[samples]
        if self._group_of is None:
            return refined(workloads, self._num_ranks)
        from .extensions.sample_groups import rebalance_groups

        home = np.arange(len(samples)) * self._num_ranks // max(len(samples), 1)
        return rebalance_groups(workloads, home, self._num_ranks, groups=self._group_of[samples])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Returns the samples of an epoch's global steps, concatenated, as int64 indices."""
        rng = np.random.default_rng((self._seed, epoch))
        order = self._shuffled(np.arange(len(self._workloads)), rng)
        in_full_steps, rest = np.split(order, [len(order) - len(order) % self._step_size])
        if self._last == "repeat":
            rest = np.concatenate([rest, np.resize(order, -len(rest) % self._num_ranks)])
        if self._num_buckets > 1:
            buckets = np.array_split(self._by_workload(np.sort(in_full_steps)), self._num_buckets)
            shuffled = np.concatenate([self._shuffled(bucket, rng) for bucket in buckets])
            in_full_steps = rng.permutation(shuffled.reshape(-1, self._step_size)).ravel()
        return np.concatenate([in_full_steps, rest])

    def _shuffled(self, samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Shuffles samples or, with groups, their groups, whose samples stay in the given order."""
        if self._group_of is None:
            return rng.permutation(samples)
        groups, group = np.unique(self._group_of[samples], return_inverse=True)
        return samples[np.argsort(rng.permutation(len(groups))[group], kind="stable")]

    def _by_workload(self, samples: np.ndarray) -> np.ndarray:
        """Sorts samples by workload or, with groups, by the mean workload of their group in `samples`."""
        workloads = self._workloads[samples]
        if self._group_of is None:
            return samples[np.argsort(workloads, kind="stable")]
        groups, group = np.unique(self._group_of[samples], return_inverse=True)
        means = np.bincount(group, workloads, len(groups)) / np.bincount(group, minlength=len(groups))
        return samples[np.lexsort((group, means[group]))]
