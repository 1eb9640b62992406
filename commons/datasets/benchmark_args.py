"""Gin settings of random data."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import gin
import numpy as np

from ..argument_checks import require
from ..checks import check_types
from .embedding_args import EmbeddingArgs
from .gin_values import require_setting, require_settings_at_least
from .hstu_batch import SequenceDatasetSpec

_NEEDED_PARAMETERS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "zipf": ("alpha",),
    "lognormal": ("mean", "std"),
}
# The largest float64 that fits int64. Larger draws would wrap around to the smallest int64.
_LARGEST = 2.0**63 - 1024


@gin.configurable
@dataclass
class RandomDistribution:
    """A distribution of integers.

    Attributes:
        dist_type: "uniform" (integers in [low, high)), "normal", "zipf", or "lognormal". Draws of the
            last three are rounded and clipped to [low, high].
        low: smallest value. None means no limit, which "uniform" does not allow.
        high: largest value, excluded only for "uniform". None means no limit, as for `low`.
        mean: mean of "normal" or "lognormal" values before clipping, not of their logarithms.
        std: standard deviation of the same values.
        alpha: exponent of "zipf", above 1.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a parameter that `dist_type` needs is missing, or a value is out of range.
    """

    dist_type: str
    low: int | None = None
    high: int | None = None
    mean: float | None = None
    std: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        known = f"one of {', '.join(_NEEDED_PARAMETERS)}"
        require_setting(self, self.dist_type in _NEEDED_PARAMETERS, "dist_type", known)
        for name in _NEEDED_PARAMETERS[self.dist_type]:
            if getattr(self, name) is None:
                raise ValueError(f"RandomDistribution.{name} is not set: {self.dist_type} needs it")
        for name in ("mean", "std", "alpha"):
            require_setting(self, math.isfinite(getattr(self, name) or 0), name, "a finite number")
        if self.low is not None:
            require_settings_at_least(self.low + (self.dist_type == "uniform"), self, "high")
        require_settings_at_least(0, self, "std")
        if self.dist_type == "lognormal":
            require_setting(self, (self.mean or 0) > 0, "mean", "more than 0, as lognormal values are")
        if self.dist_type == "zipf":
            require_setting(self, (self.alpha or 0) > 1, "alpha", "more than 1")

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draws `[size]` int64 values with `rng`."""
        if self.dist_type == "uniform":
            return rng.integers(self.low or 0, self.high or 0, size)
        mean, std = self.mean or 0.0, self.std or 0.0
        if self.dist_type == "zipf":
            drawn: np.ndarray = rng.zipf(self.alpha or 0.0, size)
        elif self.dist_type == "normal":
            drawn = rng.normal(mean, std, size)
        else:
            variance = math.log1p((std / mean) ** 2)  # of the underlying normal distribution
            drawn = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), size)
        # Always two limits, because numpy before 2.1 does not accept None for both.
        low = -_LARGEST if self.low is None else max(self.low, -_LARGEST)
        high = _LARGEST if self.high is None else min(self.high, _LARGEST)
        return np.rint(np.clip(drawn, low, high)).astype(np.int64)


@gin.configurable
@dataclass
class FeatureArgs:
    """Features that all have the same length, in ids, within a sample.

    Attributes:
        feature_names: names of the features.
        max_sequence_length: largest length of a feature.
        is_jagged: whether lengths differ between samples. If not, all are `max_sequence_length`.
        seqlen_dist: distribution of the lengths of jagged features, clipped to [1, max_sequence_length]. None
            means uniform over that range.
        value_dists: distributions of ids by feature. Ids wrap around at the vocabulary size, except in
            features of dynamic tables other than the action feature. A feature without a distribution is
            uniform over its vocabulary, or over as many ids as its dynamic table has rows.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range, or `value_dists` has a feature that is not in `feature_names`.
    """

    feature_names: list[str]
    max_sequence_length: int
    is_jagged: bool = False
    seqlen_dist: RandomDistribution | None = None
    value_dists: dict[str, RandomDistribution] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        require_setting(self, bool(self.feature_names), "feature_names", "at least one feature")
        require_settings_at_least(1, self, "max_sequence_length")
        for feature in self.value_dists or {}:
            known = f"one of {self.feature_names}"
            require(feature in self.feature_names, "a feature of FeatureArgs.value_dists", feature, known)

    def lengths(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draws `[size]` int64 lengths with `rng`."""
        longest = self.max_sequence_length
        if not self.is_jagged:
            return np.full(size, longest)
        if self.seqlen_dist is None:
            return rng.integers(1, longest + 1, size)
        return self.seqlen_dist.sample(rng, size).clip(1, longest)


@gin.configurable
@dataclass
class BenchmarkDatasetArgs:
    """A dataset of random samples.

    Generates only the item feature, the action feature, and the contextual features. Ignores other features
    and their tables.

    Attributes:
        feature_args: lengths and ids of the features.
        embedding_args: embedding tables, whose sizes are the features' vocabularies.
        item_feature_name: name of the feature with the items.
        contextual_feature_names: names of the features that describe the user.
        action_feature_name: name of the feature with one action per item, or None.
        max_num_candidates: largest number of candidates per sample. 0 means that samples have none.
        num_generated_batches: number of batches per rank and epoch.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range, or a feature is not in exactly one `FeatureArgs` and one table.
    """

    feature_args: list[FeatureArgs]
    embedding_args: list[EmbeddingArgs]
    item_feature_name: str
    contextual_feature_names: list[str]
    action_feature_name: str | None = None
    max_num_candidates: int = 0
    num_generated_batches: int = 100

    def __post_init__(self) -> None:
        check_types(self)
        require_settings_at_least(0, self, "max_num_candidates")
        require_settings_at_least(1, self, "num_generated_batches")
        described = Counter(name for args in self.feature_args for name in args.feature_names)
        served = Counter(name for args in self.embedding_args for name in args.feature_names)
        for name in self._used_features():
            for setting, count in (("feature_args", described[name]), ("embedding_args", served[name])):
                times = f"times that BenchmarkDatasetArgs.{setting} has feature {name!r}"
                require(count == 1, times, count, "once")
        with_items = self._features_of(self.item_feature_name).feature_names
        expected = f"one of {with_items}, which share a FeatureArgs with the items: every item has one action"
        has_actions = self.action_feature_name in (None, *with_items)
        require_setting(self, has_actions, "action_feature_name", expected)

    def _used_features(self) -> list[str]:
        actions = [] if self.action_feature_name is None else [self.action_feature_name]
        return [*self.contextual_feature_names, self.item_feature_name, *actions]

    def _features_of(self, feature: str) -> FeatureArgs:
        """Returns the entry of `feature_args` that describes a feature in use."""
        return next(args for args in self.feature_args if feature in args.feature_names)

    def spec(self) -> SequenceDatasetSpec:
        """Returns the spec of the samples. A label is an action id, so each action id is a class."""
        used = self._used_features()
        tables = [
            replace(table, feature_names=[name for name in table.feature_names if name in used])
            for table in self.embedding_args
            if not set(used).isdisjoint(table.feature_names)
        ]
        sizes = {name: table.item_vocab_size_or_capacity for table in tables for name in table.feature_names}
        return SequenceDatasetSpec(
            contextual_feature_names=tuple(self.contextual_feature_names),
            item_feature_name=self.item_feature_name,
            action_feature_name=self.action_feature_name,
            feature_to_max_seqlen={name: self._features_of(name).max_sequence_length for name in used},
            tables=tuple(tables),
            max_num_candidates=self.max_num_candidates,
            num_classes=1 if self.action_feature_name is None else sizes[self.action_feature_name],
            positive_class=None,
        )
