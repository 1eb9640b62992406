"""A small random dataset, of items with actions and one contextual feature."""

from typing import Any

from commons.datasets import BenchmarkDatasetArgs, EmbeddingArgs, FeatureArgs


def random_args(sequence: FeatureArgs | None = None, **changes: Any) -> BenchmarkDatasetArgs:
    """Settings of samples with 1 to 8 items and actions, and two ids of the user."""
    settings = {
        "feature_args": [
            sequence or FeatureArgs(["item", "act"], 8, is_jagged=True),
            FeatureArgs(["user"], 2),
        ],
        "embedding_args": [
            EmbeddingArgs(["item"], "item", 50, "model_parallel"),
            EmbeddingArgs(["act"], "act", 4, "data_parallel"),
            EmbeddingArgs(["user"], "user", 9, "data_parallel"),
        ],
        "item_feature_name": "item",
        "contextual_feature_names": ["user"],
        "action_feature_name": "act",
    }
    return BenchmarkDatasetArgs(**(settings | changes))
