"""Wrong arguments are named, and those that are right may be of any kind."""

import pytest

from commons.partition import (
    imbalance,
    karmarkar_karp,
    longest_processing_time,
    lower_bound,
    rebalance,
    refined,
)
from tests.commons.partition.arguments import check_kinds_of_arguments, check_wrong_arguments
from tests.commons.partition.internals import loads, refine

OF_SAMPLES = [karmarkar_karp, longest_processing_time, lower_bound, rebalance, refine, refined]
every_function = pytest.mark.parametrize("function", [*OF_SAMPLES, loads, imbalance])


@every_function
def test_wrong_arguments_are_named(function):
    check_wrong_arguments(function, but=() if function in OF_SAMPLES else ("partition",))
    if function is imbalance:
        with pytest.raises(ValueError, match="num_partitions is 0"):
            imbalance([1, 2], [])


@every_function
def test_kind_and_type_of_arguments_do_not_matter(function):
    check_kinds_of_arguments(function)


@pytest.mark.parametrize("function", [longest_processing_time, refined, rebalance, refine])
def test_arguments_that_belong_together_are_named(function):
    first = ([[0], [1]],) if function is refine else ([0, 1], 2) if function is rebalance else (2,)
    for limits, needed in (
        ({"tokens": [1, 1]}, "max_tokens"),
        ({"max_tokens": 9}, "tokens"),
        ({"token_tolerance": 0.1}, "tokens"),
    ):
        if "token_tolerance" not in limits or function in (refined, rebalance):
            with pytest.raises(ValueError, match=f"{next(iter(limits))} is given without {needed}"):
                function([1, 2], *first, **limits)
