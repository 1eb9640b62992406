"""Evaluation counts every sample once."""

from commons.warn_once import warn_once
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.commons.pipeline.runs import check_summed, summed_outputs


def _summed_with_warnings() -> tuple[list[float], list[str]]:
    warn_once.cache_clear()
    with warnings_of("commons.pipeline.shuffle_stage") as messages:
        return summed_outputs({}), messages


def test_outputs_of_samples_add_up_to_those_of_all_and_a_copied_row_is_named(pools):
    """The last step has one sample for two ranks."""
    results = pools(2).run(_summed_with_warnings)
    check_summed([summed for summed, _ in results])
    told = [[message for message in messages if "pipeline.num_samples" in message] for _, messages in results]
    assert [len(of_rank) for of_rank in told] == [1, 0]
