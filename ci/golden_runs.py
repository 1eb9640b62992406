"""Records fingerprints of random steps, to compare two checkouts.

Run `python -m ci.golden_runs FILE` in each checkout, then `python -m ci.golden_runs FILE FILE` to compare.

A case draws ranks, rows, padding, costs, limits, speeds, nodes, sub-groups, and extensions. Its steps run in
a pipeline, or through `plan` and `exchange`. A loader may end early, or yield a batch that is rejected. Each
rank records plans, hashes of exchanged batches, losses, reports, errors, and warnings. One more case counts
the kernels and host waits of exchanges on a recorded GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import re
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

import commons.extensions.more_kinds  # noqa: F401  for its effect
from benchmarks import exchange_kernels
from commons.distributed import BatchShuffler, Extension
from commons.extensions.learned_costs import LearnedCosts
from commons.extensions.micro_batches import MicroBatches
from commons.extensions.pieces import Pieces
from commons.extensions.sample_groups import SampleGroups
from commons.extensions.unshuffle import Unshuffle
from commons.extensions.verification import Verification
from commons.pipeline import TrainPipelineFactory
from commons.sequence_batch import BaseBatch
from tests.commons.distributed.container_batches import make_batch
from tests.commons.histories import TokenShuffler, histories
from tests.drawn_batches import draw_batch

RANKS, CASES, STEPS = (2, 3, 4), 300, 3
KERNELS = "kernels of an exchange"
SUB_GROUPS = {2: [[0], [1]], 3: [[0, 2], [1]], 4: [[0, 3], [1, 2]]}
CONTAINERS = {"dict": "dict with nested tensors", "torchrec": "torchrec", "tensordict": "tensordict"}
PARTITIONERS = ("rebalance", "rebalance", "refined", "longest_processing_time", "karmarkar_karp")


class Given(Extension):
    """An extension that sets the speeds that a case has drawn."""

    name, order = "given", 5

    def __init__(self, speeds: np.ndarray) -> None:
        self._speeds = speeds

    def place(self, rows: Any, place: Any) -> Any:
        """Places rows with these speeds."""
        return place(replace(rows, speeds=self._speeds[: rows.num_ranks]))


class Drawn(BatchShuffler):
    """A shuffler of drawn batches other than histories."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns a cost that depends on each sample's number."""
        ids = batch.workload if isinstance(batch, BaseBatch) else self._ids(batch)
        return ids.long() % 97 * (ids.long() % 7)

    @staticmethod
    def _ids(batch: Any) -> torch.Tensor:
        return batch["ids"] if not hasattr(batch, "labels") else batch.labels


class Loss(torch.nn.Module):
    """A model of one trained weight, with a loss per label and an output per row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a loss for each label, and a number for each row."""
        values = batch.labels.values().float() if isinstance(batch, BaseBatch) else Drawn._ids(batch).float()
        rows = batch.batch_size if isinstance(batch, BaseBatch) else len(values)
        losses = self.weight * values / 100
        if (pieces := getattr(batch, "pieces", None)) is not None:
            seen = pieces.all_rows()["last_token"]
            num_tokens = int((pieces.rows["last_token"] - pieces.rows["first_token"]).sum())
            keys = self.weight * torch.arange(num_tokens).float()[:, None, None]
            landed = pieces.fetch(seen, torch.device("cpu")).start(keys, keys).land()
            losses = torch.cat([losses, landed.sum()[None] / 1000])
        return losses, self.weight * torch.arange(rows)


def main() -> None:
    """Records a checkout, or compares two records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="one to write, or two to compare")
    files = parser.parse_args().files
    if len(files) == 1:
        files[0].write_text(json.dumps(record(), indent=1, ensure_ascii=False))
        return
    before, after = (json.loads(file.read_text()) for file in files[:2])
    differing = [case for case in before if before[case] != after.get(case)]
    for case in differing:
        print(f"case {case}: {'' if case == KERNELS else describe(int(case))}")
        for rank, (old, new) in enumerate(zip(before[case], after[case], strict=True)):
            for was, now in [(a, b) for a, b in zip(old, new, strict=False) if a != b][:2]:
                print(f"  rank {rank}\n    before {was}\n    after  {now}")
            if len(old) != len(new):
                print(f"  rank {rank}: {len(old)} records before, {len(new)} after")
    raise SystemExit(f"{len(differing)} of {len(before)} cases differ")


def record() -> dict[str, list[list[str]]]:
    """Returns each rank's records, by case."""
    records: dict[str, list[list[str]]] = {}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_run_cases, (ranks, folder), nprocs=ranks)
            found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        records |= {case: [of_rank[case] for of_rank in found] for case in found[0]}
    return records


def describe(case: int) -> dict[str, Any]:
    """Returns a random case, which is the same on all ranks."""
    rng = np.random.default_rng([47, case])
    kind = str(rng.choice(["histories", "histories", "mixed", *CONTAINERS]))
    settings: dict[str, Any] = {"equal_rows": bool(rng.random() < 0.5)}
    settings["exchange"] = str(rng.choice(["all_to_all", "all_gather"]))
    settings["partitioner"] = str(rng.choice(PARTITIONERS))
    rebalances = settings["partitioner"] == "rebalance"
    if settings["partitioner"] != "karmarkar_karp" and rng.random() < 0.2:
        settings["max_tokens"] = int(rng.choice([60, 200, 1000]))
    names = [name for name in ("verification", "unshuffle") if rng.random() < 0.25]
    if rebalances and kind in ("histories", "mixed") and rng.random() < 0.3:
        names.append("groups")
    in_pipeline = kind != "mixed" and bool(rng.random() < 0.5)
    learns = not in_pipeline and rng.random() < 0.3  # a pipeline learns from times, which vary
    cuts = kind == "histories" and not settings["equal_rows"] and rng.random() < 0.6
    names += ["learned"] if learns else []
    if cuts:
        names.append("pieces")
    elif kind == "histories" and rng.random() < 0.3:
        names.append("micro-batches")
    return {
        "case": case,
        "ranks": RANKS[case % len(RANKS)],
        "kind": kind,
        "settings": settings,
        "extensions": names,
        "sub_groups": bool(rng.random() < 0.2),
        "speeds": bool(rng.random() < 0.2) and not learns,
        "nodes": bool(rng.random() < 0.3),
        "rows": int(rng.integers(1, 9)),
        "pipeline": in_pipeline,
        "fails": bool(rng.random() < 0.1),
        "ends": bool(rng.random() < 0.3),
        "enabled": bool(rng.random() < 0.95) or learns or cuts,
    }


def _run_cases(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    records = {}
    cases = [case for case in range(CASES) if RANKS[case % len(RANKS)] == ranks]
    for case in tqdm(cases, f"{ranks} ranks", disable=rank > 0):
        records[str(case)] = _Recorder(describe(case), rank).run()
    if ranks == exchange_kernels.RANKS:
        counts = {name: exchange_kernels.count(name) for name in exchange_kernels.BATCHES}
        records[KERNELS] = [f"{name} {of_name}" for name, of_name in counts.items()]
    Path(folder, f"{rank}.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


class _Recorder(logging.Handler):
    """A log handler that runs a case on one rank, and takes notes of results and warnings."""

    def __init__(self, case: dict[str, Any], rank: int) -> None:
        super().__init__(logging.WARNING)
        self._case, self._rank = case, rank
        self._notes: list[str] = []
        self._warnings: list[str] = []  # kept apart, because the planning thread's come in any order

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a warning."""
        self._warnings.append(f"warning {record.getMessage()}")

    def run(self) -> list[str]:
        """Runs the case, and returns the notes."""
        logging.getLogger("commons").addHandler(self)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._run()
        except Exception as error:
            self._note(type(error).__name__, str(error))
        finally:
            logging.getLogger("commons").removeHandler(self)
        return self._notes + sorted(self._warnings)

    def _run(self) -> None:
        case = self._case
        shuffler = self._shuffler()
        if case["pipeline"]:
            self._train(shuffler)
            return
        for step, batch in enumerate(self._batches()):
            try:
                plan = shuffler.plan(batch)
            except Exception as error:
                self._note(type(error).__name__, str(error))
                continue
            self._note("plan", _hash(plan.destination), plan.num_rows.tolist(), plan.num_loss_tokens)
            self._note("loads", plan.loads.tolist())
            if plan.has_batch:
                self._exchange(shuffler, batch, plan, step)

    def _exchange(self, shuffler: BatchShuffler, batch: Any, plan: Any, step: int) -> None:
        brought = shuffler.padding_batch() if batch is None else batch
        with torch.no_grad():
            placed = shuffler.exchange(brought, plan)
        self._note("batch", _hash(placed), plan.traffic)
        for extension in shuffler.extensions:
            if isinstance(extension, Unshuffle):
                rows = placed.batch_size if isinstance(placed, BaseBatch) else len(Drawn._ids(placed))
                values = {"a": torch.arange(rows) + 10 * self._rank, "b": torch.ones(rows, 2)}
                self._note("unshuffled", _hash(extension.unshuffle(values, plan)))
            if isinstance(extension, MicroBatches):
                parts = extension.micro_batches(placed, plan)
                self._note("micro-batches", [_hash(part) for part in parts])
            if isinstance(extension, LearnedCosts):
                extension.record(plan, 0.01 * (1 + self._rank) + 0.001 * step)

    def _train(self, shuffler: BatchShuffler) -> None:
        model = Loss()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        pipeline = TrainPipelineFactory.create(
            "none",
            model=model,
            optimizer=optimizer,
            device="cpu",
            batch_shuffler=shuffler,
            loss_reduction="sum",
        )
        loader = iter([batch for batch in self._batches() if batch is not None])
        for _ in range(3 * STEPS):
            try:
                output = pipeline.progress(loader)
            except StopIteration:
                self._note("end")
                break
            except Exception as error:
                self._note(type(error).__name__, str(error))
                continue
            report = pipeline.report
            self._note("step", _hash(output), _rounded(pipeline.loss_sum), pipeline.loss_tokens)
            self._note("plan", _hash(pipeline.plan.destination), pipeline.plan.num_rows.tolist())
            self._note(
                "report",
                report.job_loads_before.tolist(),
                report.job_loads_after.tolist(),
                report.samples_moved,
            )
            self._note("bytes", report.bytes_moved, report.bytes_sent, _rounded(report.lower_bound))
            figures = {k: v for k, v in report.extensions.items() if "seconds" not in k}
            self._note("extensions", sorted(figures.items()), _rounded(model.weight))

    def _shuffler(self) -> BatchShuffler:
        case = self._case
        ranks, group = case["ranks"], None
        if case["sub_groups"]:
            made = [dist.new_group(members) for members in SUB_GROUPS[ranks]]
            (group,) = (of for of in made if dist.get_rank(of) >= 0)
        by_user = (
            SampleGroups("user")
            if case["kind"] == "histories"
            else SampleGroups(get_groups=lambda batch: batch.workload.long() % 3)
        )
        made_of = {
            "verification": Verification,
            "unshuffle": Unshuffle,
            "groups": lambda: by_user,
            "learned": LearnedCosts,
            "pieces": Pieces,
            "micro-batches": lambda: MicroBatches(64),
        }
        extensions = [made_of[name]() for name in case["extensions"]]  # type: ignore[operator]
        if case["speeds"]:
            extensions.append(Given(1 + np.arange(ranks) % 2 * 0.25))
        of = TokenShuffler if case["kind"] == "histories" else Drawn
        shuffler = of(group, extensions=extensions, enabled=case["enabled"], **case["settings"])
        shuffler.group.ranks_per_node = 2 if case["nodes"] else None
        return shuffler

    def _batches(self) -> list[Any]:
        case = self._case
        batches: list[Any] = [self._draw(step) for step in range(STEPS)]
        if case["ends"] and self._rank == 1:
            batches[-1] = None
        return batches

    def _draw(self, step: int) -> Any:
        case, first = self._case, 1000 * (self._rank + 1) + 100 * step
        rng = np.random.default_rng([case["case"], self._rank, step])
        rows = case["rows"]
        fails = case["fails"] and step == 1 and self._rank == 0
        if case["kind"] == "histories":
            real = int(rng.integers(0, rows + 1)) if rng.random() < 0.4 else rows
            items = rng.lognormal(3, 1.2, rows).clip(1, 400)
            batch = histories(items, rng, num_real=real, num_users=1)
            return replace(batch, labels=batch.features) if fails else batch
        if case["kind"] == "mixed":
            batch = draw_batch(rng, first, rows, int(rng.integers(0, rows + 1)))
            return replace(batch, matrix=batch.matrix.float()) if fails else batch
        rows = rows + int(rng.integers(0, 2))
        return make_batch(CONTAINERS["dict" if fails else case["kind"]], case["case"], first, rows)

    def _note(self, what: str, *values: Any) -> None:
        text = f"{what} {' '.join(map(str, values))}"
        text = re.sub(r"0x[0-9a-f]{6,}", "0x…", text)  # addresses, and hashes that may change with the code
        self._notes.append(text)


def _rounded(value: Any) -> str:
    return f"{float(value):.9g}"


def _hash(value: Any) -> str:
    """Returns a hash of all tensors, arrays, and plain values in a value of any type."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and not value.is_nested:
        digest.update(repr((value.dtype, tuple(value.shape))).encode())
        flat = value.detach().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, np.ndarray):
        _feed(digest, torch.from_numpy(np.array(value)))
    elif hasattr(value, "lengths_or_none") or (isinstance(value, torch.Tensor) and value.is_nested):
        _feed(digest, value.values())
        nested = isinstance(value, torch.Tensor)
        _feed(digest, value.offsets() if nested else value.lengths())
        _feed(digest, None if nested else value.weights_or_none())
        digest.update(repr(value.keys() if hasattr(value, "keys") and not nested else "").encode())
    elif dataclasses.is_dataclass(value):
        _feed(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif hasattr(value, "items"):
        for key, part in value.items():
            digest.update(repr(key).encode())
            _feed(digest, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _feed(digest, part)
    else:
        digest.update(repr(value).encode())


if __name__ == "__main__":
    main()
