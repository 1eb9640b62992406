"""The sampler deals each global batch of a stream once, by cost and by user, and resumes where it stopped."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Sampler

from commons.partition import imbalance
from tests.examples.programs import load, losses_of_steps, printed_losses
from tests.few_examples import few_examples

EXAMPLE = load("stream_sampler")
ROWS, RANKS = 16, 4


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return len(EXAMPLE.Listens())

    def __getitem__(self, index: int) -> int:
        return index


def sampler_of(rank: int = 0, rows: int = ROWS, ranks: int = RANKS) -> Sampler[list[int]]:
    stream = EXAMPLE.Listens()
    return EXAMPLE.StreamSampler(stream.users, stream.lengths**2, rows, rank, ranks)


def load_batches(sampler: Sampler[list[int]], workers: int = 0) -> Iterator[list[int]]:
    return iter(DataLoader(Indices(), batch_sampler=sampler, collate_fn=list, num_workers=workers))


def deal(rows: int = ROWS, ranks: int = RANKS) -> list[list[np.ndarray]]:
    """Returns each rank's samples, for each step."""
    by_rank = [sampler_of(rank, rows, ranks) for rank in range(ranks)]
    return [[np.array(batch) for batch in step] for step in zip(*by_rank, strict=True)]


@few_examples  # an example deals the whole stream
@given(rows=st.integers(1, 40), ranks=st.integers(1, 9))
def test_steps_have_the_samples_of_the_stream_in_order_and_ranks_equal_rows(rows, ranks):
    steps = deal(rows, ranks)
    assert len(steps) == len(Indices()) // (rows * ranks) == len(sampler_of(0, rows, ranks))
    for number, step in enumerate(steps):
        assert [len(samples) for samples in step] == [rows] * ranks
        first = number * rows * ranks
        assert np.array_equal(np.sort(np.concatenate(step)), np.arange(first, first + rows * ranks))
        assert all((np.diff(samples) > 0).all() for samples in step)  # in time order on each rank


def test_ranks_are_balanced_and_have_few_users_in_common():
    stream = EXAMPLE.Listens()
    costs, users = stream.lengths**2, stream.users
    size = ROWS * RANKS
    for number, step in enumerate(deal()):
        round_robin = [number * size + np.arange(rank, size, RANKS) for rank in range(RANKS)]
        assert imbalance(costs, step) <= imbalance(costs, round_robin)
        ranks_of_users, before = (
            sum(len(np.unique(users[samples])) for samples in each) for each in (step, round_robin)
        )
        assert ranks_of_users < before


@pytest.mark.parametrize(("workers", "trained"), [(0, 10), (2, 1)])
def test_a_resumed_loader_goes_on_as_one_that_was_not_interrupted(workers, trained):
    sampler, resumed = sampler_of(1), sampler_of(1)
    uninterrupted = list(load_batches(sampler_of(1)))
    before = list(itertools.islice(load_batches(sampler, workers), trained))
    state = {"samples": trained * ROWS * RANKS}
    assert workers or sampler.state_dict() == state  # workers have loaded more
    resumed.load_state_dict(state)
    assert len(resumed) == len(uninterrupted) - trained
    assert before + list(load_batches(resumed, workers)) == uninterrupted
    assert list(resumed) == uninterrupted  # the next pass begins with the stream


def test_other_numbers_of_ranks_and_rows_resume():
    state = {"samples": 3 * ROWS * RANKS}
    by_rank = [sampler_of(rank, rows=5, ranks=3) for rank in range(3)]
    for sampler in by_rank:
        sampler.load_state_dict(state)
    first = np.concatenate([next(iter(sampler)) for sampler in by_rank])
    assert np.array_equal(np.sort(first), np.arange(state["samples"], state["samples"] + 15))


def test_the_program_learns_what_a_single_process_does(tmp_path):
    """In the order of the stream; in its midst it resumes from a checkpoint."""
    torch.manual_seed(1)
    model, loss_of = EXAMPLE.LikeModel(), torch.nn.functional.binary_cross_entropy_with_logits
    batches = DataLoader(EXAMPLE.Listens(), 2 * EXAMPLE.ROWS, drop_last=True, collate_fn=EXAMPLE.collate)
    alone = losses_of_steps(model, (loss_of(model(items), liked) for items, liked in batches))
    assert printed_losses("stream_sampler", tmp_path) == pytest.approx(alone, abs=1e-4)
