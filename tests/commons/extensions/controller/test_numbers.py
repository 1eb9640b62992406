"""Numbers of groups and of results are exact, whatever their sign and size."""

import numpy as np
import pytest
import torch

from commons.extensions.controller import merge, split_balanced


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_given_groups_stay_together_whatever_the_sign_of_their_number(kind):
    groups = [-7, 12, -3] * 4
    workloads = [9, 1, 4, 1, 8, 2, 6, 3, 1, 5, 2, 7]
    _, order = split_balanced({"ids": torch.arange(12)}, 3, workloads, kind(groups))
    assert all(len({groups[sample] for sample in samples}) == 1 for samples in order.partition)


def test_merged_integers_are_exact_where_a_chunk_without_samples_returned_floats():
    ids = np.array([2**60 + 1, 2**60 + 3, 2**60 + 5])
    chunks, order = split_balanced({"row": torch.arange(3)}, 4, [3, 2, 1])
    results = [{"id": np.array([ids[row] for row in chunk["row"].tolist()])} for chunk in chunks]
    assert merge(results, order)["id"].tolist() == ids.tolist()


@pytest.mark.parametrize("workloads", [np.ma.array([1, 2], mask=[0, 1]), torch.tensor([1 + 3j, 2])])
def test_costs_of_which_a_part_would_be_dropped_are_refused(workloads):
    with pytest.raises((TypeError, ValueError), match="workloads"):
        split_balanced({"ids": torch.arange(2)}, 2, workloads)
