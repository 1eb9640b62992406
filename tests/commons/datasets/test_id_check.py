from dataclasses import replace

import numpy as np
import pytest

from commons.datasets import (
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    HSTUSample,
    SequenceDatasetSpec,
    check_ids,
    collate_hstu_batch,
)

SPEC = SequenceDatasetSpec(
    contextual_feature_names=("user",),
    item_feature_name="item",
    action_feature_name=None,
    feature_to_max_seqlen={"user": 1, "item": 5},
    tables=(
        EmbeddingArgs(["user"], "user", 3, "data_parallel"),
        EmbeddingArgs(["item"], "item", 10, "model_parallel"),
    ),
    max_num_candidates=0,
    num_classes=1,
    positive_class=None,
)


def batch(rows, users):
    samples = [
        HSTUSample({"user": np.array([user])}, np.array(items, dtype=np.int64), None, np.zeros(0, int), 0)
        for items, user in zip(rows, users, strict=True)
    ]
    return collate_hstu_batch(samples, SPEC, batch_size=5)


def test_ids_of_their_tables_pass():
    check_ids(batch([[0, 9], [], [3]], [0, 1, 2]), SPEC)
    check_ids(batch([], []), SPEC)


@pytest.mark.parametrize(
    "rows, users, message",
    [
        (
            [[0], [], [1, 2, 10]],
            [0, 0, 0],
            "'item' has id 10 in row 2; its table has 10 rows, so ids are 0 to 9",
        ),
        ([[0], [-4, 11], [1]], [0, 0, 0], "'item' has id -4 in row 1"),
        ([[99], [], []], [0, 3, 0], "'user' has id 3 in row 1; its table has 3 rows"),
    ],
)
def test_another_id_is_named_with_its_feature_row_and_table_size(rows, users, message):
    with pytest.raises(ValueError, match=message):
        check_ids(batch(rows, users), SPEC)


def test_a_dynamic_table_takes_any_id_but_the_smallest():
    tables = (SPEC.tables[0], DynamicEmbeddingArgs(["item"], "item", 10))
    spec = replace(SPEC, tables=tables)
    assert spec.unbounded_features == {"item"}
    check_ids(batch([[0, 10, 2**63 - 1], [-1, -(2**63) + 1], []], [0, 1, 2]), spec)
    with pytest.raises(ValueError, match=r"'item' has id -9223372036854775808 in row 2; ids of a dynamic"):
        check_ids(batch([[0], [], [1, -(2**63), 10]], [0, 1, 2]), spec)
    with pytest.raises(ValueError, match="'user' has id 3 in row 1; its table has 3 rows"):
        check_ids(batch([[99], [], []], [0, 3, 0]), spec)
