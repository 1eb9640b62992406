"""Programs of examples and of `tests/trainers/`, before and with balancing, and what they should learn."""

import ast
import contextlib
import functools
import io
import itertools
import os
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commons.extensions.padded import Padded
from tests.e2e.torchrun import REPOSITORY
from tests.process_pool import ProcessPool, free_port

FOLDER = REPOSITORY / "examples"
TRAINERS_FOLDER = REPOSITORY / "tests" / "trainers"
MARK = "  # balancing"
BATCH_SIZE, STEPS = 8, 20
_BEFORE = re.compile(r"^(\s*)# before: ", re.MULTILINE)

Rows = list[list[Any]]  # of each rank
# Of each parameter the rank's shards: where each begins, and its values.
Shards = dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]


@dataclass(frozen=True)
class Program:
    """How a program makes its model, its optimizer's settings, and batches per step.

    `call` runs the model on a batch, by default as a pipeline would. `optimizers` makes those of a single
    process, by default one for all parameters. `settings` makes those of the shuffler.
    """

    make_model: Callable[[Any], torch.nn.Module]
    sgd: Mapping[str, float]
    accumulated: int = 1
    call: Callable[[torch.nn.Module, Any], Any] = lambda model, batch: model(batch)
    optimizers: Callable[[Any, Any], list[Any]] | None = None
    settings: Callable[[], dict[str, Any]] = dict


EXAMPLES = {
    "pooled_dlrm": Program(lambda module: module.make_model(), {"lr": 0.5}),
    "nested_batch": Program(lambda module: module.ClickModel(), {"lr": 0.1}),
    "padded_sasrec": Program(
        lambda module: module.SASRec(),
        {"lr": 0.1},
        settings=lambda: {"equal_rows": False, "extensions": [Padded()]},
    ),
    "bert4rec": Program(lambda module: module.Bert4Rec(), {"lr": 0.1}),
    "gradient_accumulation": Program(lambda module: module.AdModel(), {"lr": 0.1, "momentum": 0.9}, 2),
}
# What they imitate of other trainers is in their docstrings.
TRAINERS = {
    "loader_bookkeeping": Program(lambda module: module.LoadedModel(), {"lr": 0.1}),
    "derived_pipeline": Program(
        lambda module: module.ClickModel(),
        {"lr": 0.1},
        optimizers=lambda module, model: [
            torch.optim.SGD(model.tables.parameters(), lr=0.1 / 2),
            module.AccumulatingOptimizer(torch.optim.SGD(model.scorer.parameters(), lr=0.1 / 2)),
        ],
    ),
    "stream_loop": Program(
        lambda module: module.StreamModel(),
        {"lr": 0.1},
        call=lambda model, batch: model(batch.history, batch.candidates, batch.labels)[0]["click"],
    ),
}
PROGRAMS = {**EXAMPLES, **TRAINERS}


def source(name: str) -> str:
    """Returns the text of a program."""
    return ((TRAINERS_FOLDER if name in TRAINERS else FOLDER) / f"{name}.py").read_text()


def in_checkout(text: str) -> str:
    """Returns the text with the name that the library has in a checkout, as processes of tests import it."""
    return text.replace("workload_balancer", "commons")


def source_before(name: str) -> str:
    """Returns the text without the marked statements, and with the code that they replace."""
    lines = source(name).splitlines()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.stmt) and lines[node.lineno - 1].endswith(MARK):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return _BEFORE.sub(r"\1", "\n".join(lines))


def load(name: str, before: bool = False) -> types.ModuleType:
    """Loads a program as a module, without running its `__main__` part."""
    module = types.ModuleType(f"example_{name}")
    sys.modules[module.__name__] = module  # batches of its own class are sent to ranks that have none
    text = source_before(name) if before else in_checkout(source(name))
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def rows_of(name: str, last: Sequence[int], steps: int = STEPS) -> Rows:
    """Returns data for some steps. The last batch has `last[rank]` rows; 0 ends the loader a batch early."""
    draw, full = load(name).draw, BATCH_SIZE * (steps * PROGRAMS[name].accumulated - 1)
    return [[draw(rank, row) for row in range(full + rows)] for rank, rows in enumerate(last)]


def trained(name: str, data: Rows, before: bool = False) -> tuple[list[float], Shards]:
    """Trains a program and returns the losses of its steps and this rank's shards of the parameters."""
    losses, model = load(name, before).train(data[dist.get_rank()], torch.device("cpu"))
    # DistributedDataParallel adds a prefix.
    shards = {name.removeprefix("module."): _shards(value) for name, value in model.state_dict().items()}
    return losses.tolist(), shards


def trained_alone(name: str, data: Rows) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains an unsharded model in a single process on the batches of all ranks."""
    module, program = load(name), PROGRAMS[name]
    torch.manual_seed(1)
    model = program.make_model(module)
    make_optimizers = program.optimizers or (lambda *_: [torch.optim.SGD(model.parameters(), **program.sgd)])
    optimizers = make_optimizers(module, model)
    losses = []
    for rows in _global_batches(data, BATCH_SIZE * program.accumulated):
        returned = program.call(model, module.collate(rows))
        loss = returned[0] if isinstance(returned, tuple) else returned
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def losses_of_steps(model: torch.nn.Module, losses: Iterable[torch.Tensor]) -> list[float]:
    """Takes a step after each loss, before the next is computed; returns them."""
    optimizer, values = torch.optim.SGD(model.parameters(), lr=0.5), []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def _global_batches(data: Rows, rows: int) -> Iterator[list[Any]]:
    for start in range(0, max(map(len, data)), rows):
        yield list(itertools.chain.from_iterable(rank_rows[start : start + rows] for rank_rows in data))


def _shards(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    if not hasattr(value, "local_shards"):
        return [((0,) * value.dim(), value.detach().clone())]
    shards = value.local_shards()
    return [(tuple(shard.metadata.shard_offsets), shard.tensor.detach().clone()) for shard in shards]


@functools.cache
def _own_ranks() -> ProcessPool:
    """Returns two ranks whose process groups are those that programs make."""
    return ProcessPool(2)


def printed_losses(name: str, folder: Path) -> list[float]:
    """Returns the losses that a program prints, from its first line to its last."""
    losses = (re.fullmatch(r"loss ([\d.]+)", line) for line in printed_lines(name, folder))
    return [float(loss[1]) for loss in losses if loss]


def printed_lines(name: str, folder: Path) -> list[str]:
    """Runs a program on two ranks. Returns what the first one prints."""
    program = folder / f"{name}.py"
    program.write_text(in_checkout(source(name)))
    return _own_ranks().run(_run_alone, str(program), free_port())[0].splitlines()


def _run_alone(program: str, port: int) -> str:
    """Runs a program that makes and destroys its process group. Returns what it prints."""
    if dist.is_initialized():  # as the pool starts
        dist.barrier()
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    with contextlib.chdir(Path(program).parent), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(program, run_name="__main__")
    assert not dist.is_initialized(), "a program ends with its process group"
    return printed.getvalue()
