"""Random samples for benchmarks."""

from __future__ import annotations

import numpy as np

from .benchmark_args import BenchmarkDatasetArgs, FeatureArgs
from .hstu_batch import HSTUSample, HSTUSource


class RandomSource(HSTUSource):
    """Random samples, each determined by the seed and its index.

    A sample has at least one item. Without candidates, every item has a label. If `args.max_num_candidates`
    is positive, the last min(max_num_candidates, items − 1) items are candidates, and only they have labels.
    A label is its item's action id. Without an action feature, labels are 0 and only mark their items.

    Args:
        args: settings of the samples' features.
        num_samples: number of samples.
        seed: seed of the samples, at least 0.

    Raises:
        ValueError: `num_samples` or `seed` is negative.
    """

    def __init__(self, args: BenchmarkDatasetArgs, num_samples: int, seed: int) -> None:
        if num_samples < 0 or seed < 0:
            raise ValueError(f"num_samples = {num_samples}, seed = {seed}: expected at least 0")
        self.spec = args.spec()
        self._args = args
        self._num_samples = num_samples
        self._seed = seed
        self._vocab_sizes = self.spec.vocab_sizes
        # An action is also a label, and only ids of the vocabulary are classes.
        self._unbounded = self.spec.unbounded_features - {self.spec.action_feature_name}

    @property
    def catalogue(self) -> np.ndarray:
        """All item ids, int64 `[items]`, ascending. For a dynamic table, the ids that it can draw.

        Raises:
            ValueError: the distribution of a dynamic table's ids has no limits.
        """
        name = self.spec.item_feature_name
        dists = [(args.value_dists or {}).get(name) for args in self._args.feature_args]
        dist = next((found for found in dists if found is not None), None)
        if dist is None or name not in self._unbounded:
            return super().catalogue
        if dist.low is None or dist.high is None:
            raise ValueError(
                f"RandomDistribution of {name!r}: low = {dist.low}, high = {dist.high}; set both, because "
                "negatives are drawn from all ids between them if the items' table is dynamic"
            )
        return np.arange(dist.low, dist.high + (dist.dist_type != "uniform"))

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> HSTUSample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index}: expected 0 to {self._num_samples - 1}")
        rng = np.random.default_rng((self._seed, index))
        ids: dict[str, np.ndarray] = {}
        for features in self._args.feature_args:
            ids |= self._draw(features, rng)
        items = ids[self.spec.item_feature_name]
        action_feature = self.spec.action_feature_name
        actions = None if action_feature is None else ids[action_feature]
        num_candidates = min(self.spec.max_num_candidates, len(items) - 1)
        first_label = len(items) - num_candidates if self.spec.max_num_candidates else 0
        labels = np.zeros_like(items) if actions is None else actions
        return HSTUSample(
            contextual={name: ids[name] for name in self.spec.contextual_feature_names},
            items=items,
            actions=actions,
            labels=labels[first_label:],
            num_candidates=num_candidates,
        )

    def _draw(self, features: FeatureArgs, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draws the ids of the features in one `FeatureArgs`, except those that the dataset does not use."""
        length = int(features.lengths(rng, 1)[0])
        value_dists = features.value_dists or {}
        drawn = {}
        for name in features.feature_names:
            if name not in self._vocab_sizes:
                continue
            if name not in value_dists:
                drawn[name] = rng.integers(0, self._vocab_sizes[name], length)
                continue
            values = value_dists[name].sample(rng, length)
            # Modulo, like a hashed vocabulary, so that ids still cover the whole of a table made smaller.
            drawn[name] = values if name in self._unbounded else values % self._vocab_sizes[name]
        return drawn
