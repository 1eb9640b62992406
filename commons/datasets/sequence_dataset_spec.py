"""What a model must know of a sequence dataset to size itself."""

from __future__ import annotations

from dataclasses import dataclass

from commons.datasets.embedding_args import DynamicEmbeddingArgs, EmbeddingArgs


@dataclass(frozen=True)
class SequenceDatasetSpec:
    """The features, tables and labels of a sequence dataset.

    Attributes:
        contextual_feature_names: features that describe the user.
        item_feature_name: the feature with the items.
        action_feature_name: the feature with one action per item, or None.
        feature_to_max_seqlen: the longest sequence of each feature; a sample's history and candidates
            together, for items and actions.
        tables: the embedding tables, which together serve each of the features once.
        max_num_candidates: the most candidates a sample may have; 0 means that there are none.
        num_classes: labels are 0 to this, exclusive.
        positive_class: labels from this class on count as positive; None where labels have no such order.
        num_tasks: if above 1, labels are bit masks of so many tasks, and `num_classes` is 2 to this.
        negatives_feature_name: the feature with items that the right ones are told from, or None.

    Raises:
        ValueError: a feature has no table, several, or no longest sequence.
    """

    contextual_feature_names: tuple[str, ...]
    item_feature_name: str
    action_feature_name: str | None
    feature_to_max_seqlen: dict[str, int]
    tables: tuple[EmbeddingArgs, ...]
    max_num_candidates: int
    num_classes: int
    positive_class: int | None
    num_tasks: int = 1
    negatives_feature_name: str | None = None

    def __post_init__(self) -> None:
        served = [feature for table in self.tables for feature in table.feature_names]
        for feature in self.feature_names:
            if served.count(feature) != 1:
                raise ValueError(
                    f"feature {feature!r} is in {served.count(feature)} embedding tables, not one"
                )
            if feature not in self.feature_to_max_seqlen:
                raise ValueError(f"feature {feature!r} has no entry in feature_to_max_seqlen")

    @property
    def feature_names(self) -> list[str]:
        """All features, in the order of batches: contextual ones, items, actions, negatives."""
        optional = (self.action_feature_name, self.negatives_feature_name)
        names = [*self.contextual_feature_names, self.item_feature_name]
        return names + [name for name in optional if name is not None]

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """Each feature's number of ids, which are 0 to that number, exclusive; of an unbounded one, rows."""
        return {
            feature: table.item_vocab_size_or_capacity
            for table in self.tables
            for feature in table.feature_names
        }

    @property
    def unbounded_features(self) -> frozenset[str]:
        """Features whose ids are any int64 but the smallest, because their tables are dynamic."""
        return frozenset(
            feature
            for table in self.tables
            if isinstance(table, DynamicEmbeddingArgs)
            for feature in table.feature_names
        )
