"""Random samples of semantic IDs for benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from commons.datasets.item_sids import ItemSIDs
from commons.datasets.random_distribution import RandomDistribution
from commons.datasets.sid_source import SIDSample, SIDSource
from commons.datasets.sid_spec import SIDDatasetSpec


class RandomSIDSource(SIDSource):
    """Random samples, each a function of the seed and its index alone; items and contextual ids are uniform.

    Args:
        sids: the catalogue that items are drawn from.
        spec: what the samples hold.
        history_length_dist: of the number of items before the target, clipped to 0 to
            `spec.max_history_length`; None means uniform from 1 to `spec.max_history_length`.
        num_samples: how many there are.
        seed: at least 0.

    Raises:
        ValueError: `num_samples` or `seed` is negative, or `sids` is not of the spec's codebooks.
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
        self._spec = spec
        self._history_length_dist = history_length_dist
        self._num_samples = num_samples
        self._seed = seed

    @property
    def spec(self) -> SIDDatasetSpec:
        """What the samples hold."""
        return self._spec

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> SIDSample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index}: expected 0 to {self._num_samples - 1}")
        rng = np.random.default_rng((self._seed, index))
        # With the target at most spec.max_items, which has room for a candidate at least.
        (history_length,) = random_history_lengths(
            self._history_length_dist, self._spec.max_history_length, rng, 1
        )
        rows = rng.integers(0, len(self._sids.items), int(history_length) + 1)
        sizes = self._spec.contextual_vocab_sizes
        return SIDSample(
            codes=self._sids.codes[rows],
            target_item=int(self._sids.items[rows[-1]]),
            contextual={name: rng.integers(0, size, 1) for name, size in sizes.items()},
        )


def random_history_lengths(
    dist: RandomDistribution | None, longest: int, rng: np.random.Generator, size: int
) -> np.ndarray:
    """Draws `[size]` int64 numbers of items before the target, as `RandomSIDSource` says."""
    if dist is None:
        return rng.integers(1, longest + 1, size)
    return dist.sample(rng, size).clip(0, longest)


def random_item_sids(codebook_sizes: Sequence[int], num_items: int, seed: int) -> ItemSIDs:
    """Items 0 to `num_items`, exclusive, each with codes of its own, drawn from all that the codebooks allow.

    Where the codebooks allow fewer, there are so many items.

    Raises:
        ValueError: a value is out of range.
    """
    if not codebook_sizes or min(codebook_sizes) < 1:
        raise ValueError(f"codebook_sizes = {tuple(codebook_sizes)}: expected positive sizes, at least one")
    if num_items < 1 or seed < 0:
        raise ValueError(f"num_items = {num_items}, seed = {seed}: expected at least 1 and at least 0")
    rng = np.random.default_rng(seed)
    num_tuples = math.prod(codebook_sizes)
    if num_tuples <= 2 * num_items:
        numbers = rng.permutation(num_tuples)[:num_items]
        codes = np.stack(np.unravel_index(numbers, tuple(codebook_sizes)), axis=1)
    else:
        codes = _distinct_tuples(codebook_sizes, num_items, rng)
    return ItemSIDs(np.arange(len(codes)), codes)


def _distinct_tuples(codebook_sizes: Sequence[int], count: int, rng: np.random.Generator) -> np.ndarray:
    """`[count, num_hierarchies]` int64, of more than twice as many: so a few draws find enough.

    Tuples rather than numbers of tuples are drawn, as int64 does not hold the numbers of many codebooks.
    """
    drawn = np.empty((0, len(codebook_sizes)), dtype=np.int64)
    while len(drawn) < count:
        more = rng.integers(0, codebook_sizes, (count, len(codebook_sizes)))
        drawn = np.unique(np.concatenate([drawn, more]), axis=0)
    return rng.permutation(drawn)[:count]  # unique has sorted them
