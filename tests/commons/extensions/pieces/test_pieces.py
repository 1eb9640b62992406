"""Pieces of a batch of one's own arrive as cut."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.balance_meter import BalanceMeter
from commons.distributed import BalanceReport, BatchShuffler, ShufflePlan
from commons.extensions.pieces import Pieces
from commons.extensions.pieces import cut_rules as of
from commons.sequence_batch import move_to
from tests.commons.distributed.errors_and_warnings import error_of
from tests.commons.distributed.loaded_batches import BOTH
from tests.commons.extensions.pieces.cut_samples import RULES, AheadBatch, ahead_batch
from tests.commons.extensions.pieces.drawn_cuts import DrawnCuts, is_cut
from tests.commons.extensions.pieces.ranking_on_pieces import sharded_model_for_pieces
from tests.commons.histories import TokenShuffler, histories
from tests.commons.pipeline.ranking_pipelines import pipeline_of
from tests.on_ranks import on_ranks


def cutting_anywhere(seed: int, **settings: Any) -> TokenShuffler:
    return TokenShuffler(extensions=[DrawnCuts(seed)], equal_rows=False, **settings)


def cut_as_planned(shuffler: BatchShuffler, batch: AheadBatch, plan: ShufflePlan) -> AheadBatch:
    """Returns the batch that is copied to the device."""
    [pieces] = shuffler.extensions
    return pieces.before_copy(shuffler.view(batch), plan).batch


def draw_history(rng: np.random.Generator, num_rows: int, num_real: int, longest: int = 12) -> AheadBatch:
    return ahead_batch(rng, rng.integers(0, longest, num_real), num_rows - num_real)


def rows_of(batch: AheadBatch) -> list[dict[str, list]]:
    """Returns the values of each real row by field."""
    jagged = {**batch.features.to_dict(), "labels": batch.labels["label"], "frames": batch.frames}
    rows = []
    for row in range(batch.num_samples):
        of_row = {
            name: value.values()[value.offsets()[row] : value.offsets()[row + 1]].tolist()
            for name, value in jagged.items()
        }
        rows.append({**of_row, "number": batch.number[row].item(), "times": batch.times[row].tolist()})
    return rows


def _exchanged(exchange: str, num_real: tuple[int, ...], seed: int, on_device: bool) -> Any:
    rng = np.random.default_rng(seed + 100 * dist.get_rank())
    batch = draw_history(rng, 5, num_real[dist.get_rank()])
    shuffler = cutting_anywhere(seed, exchange=exchange)
    plan = shuffler.plan(batch)
    if not is_cut(plan):
        return None
    moved = {plan.rows.sample_of[row] for row in np.flatnonzero(plan.rows.home != plan.destination)}
    assert BalanceReport.of(plan, equal_rows=False).samples_moved == len(moved)
    arrived = shuffler.exchange(cut_as_planned(shuffler, batch, plan) if on_device else batch, plan)
    assert arrived.num_samples == plan.num_placed[dist.get_rank()]
    mine = {name: counts.tolist() for name, counts in arrived.row_counts_on_host().items()}
    lengths = arrived.features.lengths().view(3, -1)
    of_keys = {f"features.{key}": lengths[at].tolist() for at, key in enumerate(arrived.features.keys())}
    assert mine == mine | of_keys
    places = arrived.pieces.rows[: arrived.num_samples].tolist()
    numbers = plan.computed_by(dist.get_rank()).tolist()
    return list(zip(numbers, places, rows_of(arrived), strict=True)), rows_of(batch)


@pytest.mark.parametrize("num_real", [(5, 3), (4, 0, 5)])
def test_pieces_arrive_as_cut_by_both_exchanges(pools, num_real):
    for seed in range(4):
        results = [
            pools(len(num_real)).run(_exchanged, exchange, num_real, seed, exchange == "all_to_all")
            for exchange in BOTH
        ]
        assert results[0] == results[1]
        if results[0][0] is None:
            continue
        pieces = sorted((piece for of_rank, _ in results[0] for piece in of_rank), key=lambda piece: piece[0])
        samples = iter(sample for _, of_rank in results[0] for sample in of_rank)
        sample: dict[str, list] = {}
        for _, (first, last, num_items, *_), got in pieces:
            sample = next(samples) if first == 0 else sample
            ends, num_labels = last == num_items, len(sample["labels"])
            unlabeled = num_items - num_labels
            assert got == {
                "user": sample["user"] if first == 0 else [],
                "item": sample["item"][first : last + 1],
                "negative": sample["negative"],
                "labels": sample["labels"][max(first - unlabeled, 0) : max(last - unlabeled, 0)],
                "frames": sample["frames"][2 * first : 2 * last],
                "number": sample["number"] if ends else 0,
                "times": sample["times"],
            }
        assert next(samples, None) is None


@on_ranks(2)
def test_a_cut_batch_is_not_cut_again_however_it_is_copied():
    batch = draw_history(np.random.default_rng(dist.get_rank()), 5, 4)
    shuffler = cutting_anywhere(2)
    plan = shuffler.plan(batch)
    assert is_cut(plan)
    cut = cut_as_planned(shuffler, batch, plan)
    cpu = torch.device("cpu")
    copies = (batch, cut, cut.to(cpu), move_to(cut, cpu), replace(cut))
    as_loaded, *copies = [rows_of(shuffler.exchange(one, plan)) for one in copies]
    assert all(of_copy == as_loaded for of_copy in copies)


@on_ranks(2)
def test_a_model_that_takes_pieces_for_samples_is_an_error():
    batch = draw_history(np.random.default_rng(dist.get_rank()), 2, 2, longest=400)
    shuffler = cutting_anywhere(1)
    plan = shuffler.plan(batch)
    arrived = shuffler.exchange(batch, plan)
    loss = arrived.features.values().float().sum()
    unread = error_of(shuffler.scale, loss, plan, "sum")
    fetch = arrived.pieces.fetch(plan.rows.columns["pieces"]["last_token"], torch.device("cpu"))
    tokens = torch.zeros(
        int((arrived.pieces.rows["last_token"] - arrived.pieces.rows["first_token"]).sum()), 1, 1
    )
    flight = fetch.start(tokens, tokens)
    not_landed = error_of(shuffler.scale, loss, plan, "sum")
    flight.land()
    not_landed, read = not_landed, error_of(shuffler.scale, loss, plan, "sum")
    assert "the model did not read batch.pieces: it took each piece for a whole sample" in unread
    assert "a model started 1 fetches for its pieces and landed 0" in not_landed
    assert read == "no error"


@on_ranks(3)
def test_the_meter_counts_samples_that_a_set_has_cut_once_on_all_ranks():
    group = [dist.new_group(ranks) for ranks in ([0], [1, 2])][dist.get_rank() > 0]
    shuffler = TokenShuffler(group, extensions=[Pieces()], equal_rows=False)
    pipeline = pipeline_of("none", *sharded_model_for_pieces(), shuffler)
    meter = BalanceMeter(pipeline)
    pipeline.progress(iter([histories([300, 3, 4] if dist.get_rank() == 2 else [3, 4])]))
    meter.add()
    figures = meter.close()
    assert (figures["samples_cut"], figures["pieces"]) == (1, 2) and "imbalance_bound" not in figures


class Changed(TokenShuffler):
    """Has other methods, or costs of the pieces' own."""

    def __init__(self, cost=None, **methods):
        vars(self).update(methods)
        super().__init__(extensions=[Pieces(cost)], equal_rows=False)


def cutting_by(fields: dict[str, Any], **changed: Any) -> Callable[[], Changed]:
    rules = replace(RULES, fields=RULES.fields | fields, **changed)
    return partial(Changed, cut_rules=lambda batch: rules)


class WithoutPrefixCost(BatchShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens()


@on_ranks(2)
def test_what_cannot_be_cut_and_contracts_that_do_not_fit_are_errors():
    rank = dist.get_rank()
    rng = np.random.default_rng(rank)
    batch = draw_history(rng, 2, 2, longest=400 if rank else 20)  # a sample of rank 1 has to be cut

    def decreasing(tokens, counts):
        return np.where(tokens == counts["tokens"], tokens**2, counts["tokens"] ** 2 + 1 - tokens)

    for make, loaded, expected in (
        (
            partial(WithoutPrefixCost, equal_rows=False, extensions=[Pieces()]),
            batch,
            "'WithoutPrefixCost' object has no attribute 'prefix_cost'",
        ),
        (partial(TokenShuffler, extensions=[Pieces()]), batch, "equal_rows=True with Pieces"),
        (
            partial(Changed, get_workloads=lambda batch: batch[0]),
            [torch.arange(3)],
            "make it a BaseBatch",
        ),
        (Changed, replace(batch, labels=None), "without jagged labels"),
        (partial(Changed, lambda tokens, _: tokens**2 // 2), batch, "prefix_cost is"),
        (partial(Changed, lambda tokens, _: tokens**2 / 2), batch, "prefix_cost returned float64"),
        (partial(Changed, decreasing), batch, "prefix_cost decreases from"),
        (cutting_by({}, items=(of.ItemGroup("features.item", tokens=2),)), batch, "of each ItemGroup"),
        (cutting_by({"loss_tokens": of.TO_EVERY}), batch, "check the rule of 'loss_tokens'"),
    ):
        error = error_of(lambda make=make, loaded=loaded: make().plan(loaded))
        assert expected in error, (expected, error)


@on_ranks(2)
def test_fields_that_disagree_are_an_error_of_the_rank_that_has_the_sample():
    rank = dist.get_rank()
    batch = draw_history(np.random.default_rng(rank), 2, 2, longest=400 if rank else 20)
    for changed, expected in (
        ({"features.user": of.TO_EVERY}, "get_tokens counts"),
        ({"loss_tokens": of.WITH_FIRST}, "get_loss_tokens counts"),
    ):
        shuffler = cutting_by({"features.item": of.ALONG_ITEMS} | changed)()
        plan = shuffler.plan(batch)  # collective, and to cut is not
        assert expected in error_of(cut_as_planned, shuffler, batch, plan) or rank == 0
