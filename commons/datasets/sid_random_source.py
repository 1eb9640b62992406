"""Random samples of semantic IDs for benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..argument_checks import require
from .benchmark_args import RandomDistribution
from .item_sids import ItemSIDs
from .sid_batch import SIDDatasetSpec, SIDSample, SIDSource


class RandomSIDSource(SIDSource):
    """Random samples, each determined by the seed and its index. Items and contextual ids are uniform.

    Args:
        sids: catalog that items are drawn from.
        spec: codes and lengths of the samples.
        history_length_dist: distribution of the number of items before the target, clipped to
            [0, spec.max_history_length]. None means uniform over [1, spec.max_history_length].
        num_samples: number of samples.
        seed: seed of the samples, at least 0.

    Raises:
        ValueError: `num_samples` or `seed` is negative, or `sids` does not fit the spec's codebooks.
    """

    def __init__(
        self,
        sids: ItemSIDs,
        spec: SIDDatasetSpec,
        history_length_dist: RandomDistribution | None,
        num_samples: int,
        seed: int,
    ) -> None:
        if num_samples < 0 or seed < 0:
            raise ValueError(f"num_samples = {num_samples}, seed = {seed}: expected at least 0")
        sids.check_codebooks(spec.codebook_sizes)
        self._sids = sids
        self.spec = spec
        self._history_length_dist = history_length_dist
        self._num_samples = num_samples
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> SIDSample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index}: expected 0 to {self._num_samples - 1}")
        rng = np.random.default_rng((self._seed, index))
        # With the target, the sample has at most spec.max_items items, which count at least one candidate.
        (history_length,) = random_history_lengths(
            self._history_length_dist, self.spec.max_history_length, rng, 1
        )
        rows = rng.integers(0, len(self._sids.items), int(history_length) + 1)
        sizes = self.spec.contextual_vocab_sizes
        return SIDSample(
            codes=self._sids.codes[rows],
            target_item=int(self._sids.items[rows[-1]]),
            contextual={name: rng.integers(0, size, 1) for name, size in sizes.items()},
        )


def random_history_lengths(
    dist: RandomDistribution | None, longest: int, rng: np.random.Generator, size: int
) -> np.ndarray:
    """Draws the numbers of items before the target as `RandomSIDSource` does, int64 `[size]`."""
    if dist is None:
        return rng.integers(1, longest + 1, size)
    return dist.sample(rng, size).clip(0, longest)


def random_item_sids(codebook_sizes: Sequence[int], num_items: int, seed: int) -> ItemSIDs:
    """Returns items 0 to `num_items` − 1 with unique random codes, or fewer items if codes run out.

    Raises:
        ValueError: a value is out of range.
    """
    sizes = tuple(codebook_sizes)
    require(bool(sizes) and min(sizes) >= 1, "codebook_sizes", sizes, "positive sizes, at least one")
    if num_items < 1 or seed < 0:
        raise ValueError(f"num_items = {num_items}, seed = {seed}: expected at least 1 and at least 0")
    rng = np.random.default_rng(seed)
    num_tuples = math.prod(sizes)
    if num_tuples <= 2 * num_items:
        numbers = rng.permutation(num_tuples)[:num_items]
        codes = np.stack(np.unravel_index(numbers, sizes), axis=1)
    else:
        codes = _distinct_tuples(sizes, num_items, rng)
    return ItemSIDs(np.arange(len(codes)), codes)


def _distinct_tuples(codebook_sizes: Sequence[int], count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws distinct tuples of codes, int64 `[count, num_hierarchies]`. At least 2 × count must exist.

    Draws tuples, not their indices, because the number of tuples may exceed int64.
    """
    drawn = np.empty((0, len(codebook_sizes)), dtype=np.int64)
    while len(drawn) < count:
        more = rng.integers(0, codebook_sizes, (count, len(codebook_sizes)))
        drawn = np.unique(np.concatenate([drawn, more]), axis=0)
    return rng.permutation(drawn)[:count]  # undoes the sorting of unique
