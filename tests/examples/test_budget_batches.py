"""Batches of a local pool keep their budgets, have each sample once, starve none, and resume."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.programs import load, losses_of_steps, printed_losses

EXAMPLE = load("budget_batches")
MOST_TOKENS = 60


@dataclass
class Case:
    lengths: np.ndarray
    pool: int
    budget: int
    max_tokens: int
    max_rows: int
    num_ranks: int
    epoch: int

    @property
    def costs(self) -> np.ndarray:
        return self.lengths**2

    def sampler(self, rank: int) -> Any:
        limits = (self.pool, self.budget, self.max_tokens, self.max_rows)
        made = EXAMPLE.BudgetSampler(self.costs, self.lengths, *limits, rank, self.num_ranks)
        made.set_epoch(self.epoch)
        return made


CASES = st.builds(
    Case,
    st.lists(st.integers(0, MOST_TOKENS), max_size=60).map(lambda drawn: np.array(drawn, dtype=np.int64)),
    pool=st.integers(1, 20),
    budget=st.integers(1, 3 * MOST_TOKENS**2),
    max_tokens=st.integers(MOST_TOKENS, 3 * MOST_TOKENS),
    max_rows=st.integers(1, 10),
    num_ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
)


@given(CASES)
def test_each_sample_is_in_one_batch_which_keeps_its_budget_and_its_caps(case):
    batches = [batch for rank in range(case.num_ranks) for batch in case.sampler(rank)]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(case.lengths)))
    for batch in batches:
        assert case.costs[batch].sum() <= case.budget or len(batch) == 1
        assert case.lengths[batch].sum() <= case.max_tokens and 0 < len(batch) <= case.max_rows


@given(CASES)
def test_none_waits_for_more_batches_than_the_pool_has_samples_and_none_that_fits_is_left(case):
    order = np.random.default_rng(case.epoch).permutation(len(case.lengths))[:: case.num_ranks].tolist()
    entered = dict.fromkeys(order[: case.pool], 0)
    for number, batch in enumerate(case.sampler(0)):
        pool = [sample for sample in order if sample in entered]
        assert pool[0] == batch[0]
        for sample in set(pool) - set(batch):
            full = len(batch) == case.max_rows
            heavy = case.costs[[*batch, sample]].sum() > case.budget
            assert full or heavy or case.lengths[[*batch, sample]].sum() > case.max_tokens
        assert all(number - entered.pop(sample) < case.pool for sample in batch)
        order = [sample for sample in order if sample not in batch]
        for sample in order[: case.pool]:
            entered.setdefault(sample, number + 1)
    assert not order


@given(CASES, st.integers(0, 60))
def test_a_resumed_sampler_goes_on_as_one_that_was_not_interrupted(case, trained):
    whole, interrupted, resumed = list(case.sampler(0)), case.sampler(0), case.sampler(0)
    before = list(itertools.islice(interrupted, trained))
    resumed.set_epoch(99)
    resumed.load_state_dict(interrupted.state_dict())
    assert before + list(resumed) == whole == list(resumed)


def test_a_sample_above_the_cap_is_refused():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens; max_tokens=8"):
        EXAMPLE.BudgetSampler(np.ones(3), np.array([1, 9, 3]), 4, 10, 8, 4, 0, 1)


def test_the_program_learns_what_a_single_process_does(tmp_path):
    """With the batches of both ranks, of which one ends before the other; it resumes in their midst."""
    torch.manual_seed(1)
    data, model = EXAMPLE.Histories(), EXAMPLE.LikeModel()
    of_ranks = [list(EXAMPLE.make_sampler(data, rank, 2)) for rank in range(2)]
    assert len(of_ranks[0]) != len(of_ranks[1])
    alone = losses_of_steps(
        model,
        (
            torch.cat(
                [model(EXAMPLE.collate([data[user] for user in batch]))[0] for batch in step if batch]
            ).mean()
            for step in itertools.zip_longest(*of_ranks, fillvalue=[])
        ),
    )
    assert printed_losses("budget_batches", tmp_path) == pytest.approx(alone, abs=1e-4)
