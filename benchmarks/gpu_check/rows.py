"""Packing, gathering, and the exchange on one GPU, compared bit for bit with the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from benchmarks.gpu_check.parts import NotRun, no_synchronization
from benchmarks.gpu_check.stand_in import is_stand_in
from commons.sequence_batch.fields import Schema
from commons.sequence_batch.packed_rows import PackedRows, read_lengths, select_rows

NUM_ROWS = 300
STREAM_STEPS = 12
DELAY_CYCLES = 50_000_000  # about 30 ms on a GPU, many times longer than the host takes to queue a step
WIDE_LIMIT, IDS_LIMIT = 1.1, 4.0  # peak ÷ bytes of the rows; ids need indices as large as themselves

Fields = dict[str, Any]


def check_packing(device: torch.device) -> str:
    """Packs a batch, and gathers its rows in another order, without synchronization."""
    host = _draw_fields(seed=0)
    order = np.random.default_rng(1).integers(0, NUM_ROWS, NUM_ROWS)
    _check_on_device(_make_reorder(host, order, padding=3), host, device)
    return f"{len(host)} fields, {NUM_ROWS} rows, {_name_tensors()}"


def check_memory(device: torch.device) -> str:
    """Compares the peak memory of a gather with the size of its rows."""
    if device.type != "cuda":
        raise NotRun("reads the counters of torch's CUDA allocator")
    wide = torch.zeros(1 << 15, 1024, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1 << 23, dtype=torch.int64, device=device)
    found = []
    for name, values, limit in (("wide rows", wide, WIDE_LIMIT), ("ids", ids, IDS_LIMIT)):
        ratio = _measure_peak(values, device) / values.nbytes
        if ratio > limit:
            raise AssertionError(f"gathering {name} takes {ratio:.2f} × their bytes, expected ≤ {limit}")
        found.append(f"{name} {ratio:.2f} ×")
    return f"peak above the batch: {', '.join(found)} the bytes of the rows"


def check_exchange(device: torch.device) -> str:
    """Exchanges all rows over a group of one rank, which sends them to itself."""
    host = _draw_fields(seed=2)
    with group_of_one(device) as backend:
        exchange = _make_exchange(host)
        exchange(move(host, device))  # the first call creates the communicator
        _check_on_device(exchange, host, device, expected=_make_reorder(host, np.arange(NUM_ROWS))(host))
    return f"all-to-all over {backend}, {_name_tensors()}"


def check_streams(device: torch.device) -> str:
    """Delays the copy and exchange stream, and computes on the default stream.

    Like a pipeline, each step drops its pinned batch once the copy is queued. So the memory of the batch and
    of its indices is free for the next step while the stream still sleeps.
    """
    hosts = [_draw_fields(seed) for seed in range(STREAM_STEPS)]
    expected = [_sum_bytes(host).tolist() for host in hosts]
    on_gpu = device.type == "cuda"
    memcpy = torch.cuda.Stream(device, priority=-1) if on_gpu else None
    with group_of_one(device):
        _make_exchange(hosts[0])(move(hosts[0], device))
        sums = []
        for host in hosts:
            with torch.cuda.stream(memcpy):
                if on_gpu:
                    torch.cuda._sleep(DELAY_CYCLES)
                exchanged = _make_exchange(host)(move(host, device, pin=on_gpu))
            if memcpy is not None:
                torch.cuda.current_stream().wait_stream(memcpy)
                for _, tensor in _list_tensors(exchanged):
                    tensor.record_stream(torch.cuda.current_stream())
            sums.append(_sum_bytes(exchanged))
    for step, (got, wanted) in enumerate(zip(sums, expected, strict=True)):
        if got.tolist() != wanted:
            raise AssertionError(f"step {step} computed on other bits than were loaded")
    return f"{STREAM_STEPS} steps, each delayed by {DELAY_CYCLES / 1e6:.0f} million cycles"


@contextmanager
def group_of_one(device: torch.device) -> Iterator[str]:
    """While active, this process is the whole default process group. Yields the name of its backend."""
    on_gpu = device.type == "cuda"
    if on_gpu and not dist.is_nccl_available():
        raise NotRun("this torch has no NCCL")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
        try:
            yield "NCCL" if on_gpu else "gloo"
        finally:
            dist.destroy_process_group()


def move(fields: Fields, device: torch.device, pin: bool = False) -> Fields:
    """Returns the fields on a device. `pin` copies them from pinned memory, without waiting."""

    def copy(tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)

    def move_field(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copy(value)
        values, weights, lengths = map(copy, (value.values(), value.weights_or_none(), value.lengths()))
        if isinstance(value, KeyedJaggedTensor):
            keys, stride = value.keys(), value.stride()
            return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride)
        return JaggedTensor(values, weights, lengths=lengths)

    return {name: move_field(value) for name, value in fields.items()}


def _check_on_device(
    function: Callable[[Fields], Fields], host: Fields, device: torch.device, expected: Fields | None = None
) -> None:
    """Checks that a function returns `expected` without synchronization. None means its result on the CPU."""
    fields = move(host, device)
    with no_synchronization(device):
        got = function(fields)
    expected = function(host) if expected is None else expected
    for (name, tensor), (_, wanted) in zip(_list_tensors(got), _list_tensors(expected), strict=True):
        kinds = [f"{value.dtype} {tuple(value.shape)}" for value in (tensor, wanted)]
        if kinds[0] != kinds[1]:
            raise AssertionError(f"{name} is {kinds[0]}, on the CPU {kinds[1]}")
        if different := int((_view_bytes(tensor.cpu()) != _view_bytes(wanted)).sum()):
            raise AssertionError(f"{name} differs from the CPU's in {different} of {wanted.nbytes} bytes")


def _draw_fields(seed: int, num_rows: int = NUM_ROWS) -> Fields:
    """Returns random host fields of several kinds and dtypes."""
    rng = np.random.default_rng(seed)

    def draw(count: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        num_bytes = count * dtype.itemsize * int(np.prod(shape, dtype=int))
        drawn = rng.integers(0, 2 if dtype == torch.bool else 256, num_bytes, dtype=np.uint8)
        return torch.from_numpy(drawn).view(dtype).view(count, *shape)

    def draw_lengths(keys: int, longest: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, longest, keys * num_rows))

    ids, short, wide = draw_lengths(3, 30), draw_lengths(1, 4).int(), draw_lengths(1, 5)
    values, weights = (draw(int(ids.sum()), dtype) for dtype in (torch.int64, torch.float32))
    tags = draw(int(short.sum()), torch.int32)
    return {
        "ids": KeyedJaggedTensor(["item", "action", "user"], values, weights, lengths=ids, stride=num_rows),
        "short": KeyedJaggedTensor(["tag"], tags, lengths=short, stride=num_rows),
        "images": JaggedTensor(draw(int(wide.sum()), torch.bfloat16, 3, 8), lengths=wide),
        "scores": draw(num_rows, torch.float64, 2),
        "flags": draw(num_rows, torch.bool),
        "bytes": draw(num_rows, torch.uint8, 5),
        "half": draw(num_rows, torch.float16, 3),
        "complex": draw(num_rows, torch.complex64),
    }


def _read_lengths(fields: Fields) -> np.ndarray:
    """Returns the lengths of host fields, int64 `[rows, keys]`."""
    return read_lengths(fields, Schema.of(fields), len(fields["flags"]))


def _make_reorder(host: Fields, rows: np.ndarray, padding: int = 0) -> Callable[[Fields], Fields]:
    """Returns a function that packs fields, and gathers `rows` in their order, followed by padding rows."""
    schema, lengths = Schema.of(host), _read_lengths(host)
    return lambda fields: select_rows([PackedRows.pack(fields, schema, lengths)], rows, len(rows) + padding)


def _make_exchange(host: Fields) -> Callable[[Fields], Fields]:
    """Returns a function that sends all rows through the process group of one rank.

    `transfer` sends no rows that stay on their rank. So this process poses as rank 1, which sends all rows to
    rank 0 of the group and receives all rows from it. Rank 0 is also this process.
    """
    from commons.distributed.exchange import RowsOf, direct_route, transfer

    schema, lengths = Schema.of(host), _read_lengths(host)
    end = RowsOf(np.zeros(NUM_ROWS, dtype=np.int64), lengths)
    route = direct_route(schema, end, end, 1, 1, len(end.ranks))
    return lambda fields: transfer(PackedRows.pack(fields, schema, lengths), route, lambda _: None)


def _measure_peak(values: torch.Tensor, device: torch.device) -> int:
    """Returns the peak bytes on the device that gathering rows of `values` allocates."""
    num_rows = 1024
    lengths = torch.full((num_rows,), len(values) // num_rows, device=device)
    fields = {"values": JaggedTensor(values, lengths=lengths)}
    schema = Schema.of(fields)
    rows = PackedRows.pack(fields, schema, read_lengths(fields, schema, num_rows))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    select_rows([rows], np.arange(num_rows)[::-1].copy())
    return torch.cuda.max_memory_allocated(device) - before


def _list_tensors(fields: Fields) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            yield name, value
            continue
        for part in ("values", "lengths", "weights_or_none"):
            tensor = getattr(value, part)()
            if tensor is not None:
                yield f"{name}.{part}", tensor


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _sum_bytes(fields: Fields) -> torch.Tensor:
    """Returns an int64 checksum per tensor over its bytes and their positions, without synchronization."""
    values = [_view_bytes(tensor).long() for _, tensor in _list_tensors(fields)]
    return torch.stack([(each * torch.arange(1, len(each) + 1, device=each.device)).sum() for each in values])


def _name_tensors() -> str:
    owner = "stand-in" if is_stand_in("torchrec") else "TorchRec's"
    return f"with {owner} jagged tensors"
