"""Packing, gathering and the exchange on one GPU, compared bit for bit with the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from benchmarks.gpu_check.parts import NotRun, no_synchronization
from benchmarks.gpu_check.stand_in import is_stand_in
from commons.sequence_batch.packed_rows import PackedRows, gather_rows, row_elements
from commons.sequence_batch.row_schema import FIELD_ALIGNMENT, RowSchema, aligned

NUM_ROWS = 300
ALIGNMENT_DRAWS = 50
STREAM_STEPS = 12
DELAY_CYCLES = 50_000_000  # some 30 ms on a GPU: many times what the host needs to queue a step
WIDE_LIMIT, IDS_LIMIT = 1.1, 4.0  # of the bytes of the rows; ids take indices as large as themselves

Fields = dict[str, Any]


def packing(device: torch.device) -> str:
    """Packs and unpacks a batch without synchronization."""
    host = _draw_fields(seed=0, num_rows=NUM_ROWS)
    fields = moved(host, device)
    with no_synchronization(device):
        got = _reordered(fields, np.arange(NUM_ROWS), _num_elements(host), padding=3)
    _check_same_bits(got, _reordered(host, np.arange(NUM_ROWS), _num_elements(host), padding=3))
    return f"{len(fields)} fields, {NUM_ROWS} rows{_of_what()}"


def gathering(device: torch.device) -> str:
    """Gathers rows of a batch, and rows that went through bytes, without synchronization."""
    host = _draw_fields(seed=1, num_rows=NUM_ROWS)
    fields = moved(host, device)
    gather = _gathering_plan(host)
    with no_synchronization(device):
        got = gather(fields)
    _check_same_bits(got, gather(host))
    return f"from a batch and from three buffers of bytes{_of_what()}"


def alignment(device: torch.device) -> str:
    """Checks that every tensor handed out starts at a multiple of 16 bytes."""
    num_tensors = 0
    for seed in range(ALIGNMENT_DRAWS):
        rng = np.random.default_rng(seed)
        num_rows = int(rng.integers(1, 40))
        host = _draw_fields(seed, num_rows)
        chosen = rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)]
        elements = row_elements(_packed(host, num_rows).lengths, RowSchema.of(host)).numpy()[chosen].sum(0)
        for name, tensor in _tensors(_reordered(moved(host, device), chosen, elements, padding=1)):
            if tensor.data_ptr() % FIELD_ALIGNMENT:
                raise AssertionError(
                    f"draw {seed}: {name} starts {tensor.data_ptr() % FIELD_ALIGNMENT} bytes after a "
                    f"multiple of {FIELD_ALIGNMENT}"
                )
            num_tensors += 1
    return f"{num_tensors} tensors of {ALIGNMENT_DRAWS} batches at multiples of {FIELD_ALIGNMENT} bytes"


def memory(device: torch.device) -> str:
    """Compares the peak memory of gathering rows with their size."""
    if device.type != "cuda":
        raise NotRun("reads the counters of torch's CUDA allocator")
    wide = torch.zeros(1 << 15, 1024, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1 << 23, dtype=torch.int64, device=device)
    found = []
    for name, values, limit in (("wide rows", wide, WIDE_LIMIT), ("ids", ids, IDS_LIMIT)):
        ratio = _peak_of_gathering(values, device) / values.nbytes
        if ratio > limit:
            raise AssertionError(
                f"gathering {name} takes {ratio:.2f} × their bytes, expected {limit} or less"
            )
        found.append(f"{name} {ratio:.2f} ×")
    return f"peak above the batch: {', '.join(found)} the bytes of the rows"


def exchange(device: torch.device) -> str:
    """Exchanges all rows over a group of one rank, which sends them to itself."""
    host = _draw_fields(seed=2, num_rows=NUM_ROWS)
    fields = moved(host, device)
    with group_of_one(device) as backend:
        exchanged = _exchange_plan(host)
        exchanged(fields)  # makes the communicator
        with no_synchronization(device):
            got = exchanged(fields)
    _check_same_bits(got, _reordered(host, np.arange(NUM_ROWS), _num_elements(host)))
    return f"all-to-all over {backend}{_of_what()}"


def streams(device: torch.device) -> str:
    """Delays the stream of copy and exchange, and computes on the default stream.

    Each step's pinned batch is dropped once its copy is queued, as a pipeline does, so that its memory, and
    that of the indices, is free for the next one while the stream still sleeps.
    """
    hosts = [_draw_fields(seed, NUM_ROWS) for seed in range(STREAM_STEPS)]
    expected = [_checksums(host).tolist() for host in hosts]
    on_gpu = device.type == "cuda"
    memcpy = torch.cuda.Stream(device, priority=-1) if on_gpu else None
    with group_of_one(device):
        _exchange_plan(hosts[0])(moved(hosts[0], device))
        sums = []
        for host in hosts:
            with torch.cuda.stream(memcpy):
                if on_gpu:
                    torch.cuda._sleep(DELAY_CYCLES)
                exchanged = _exchange_plan(host)(moved(host, device, pin=on_gpu))
            if memcpy is not None:
                torch.cuda.current_stream().wait_stream(memcpy)
                for _, tensor in _tensors(exchanged):
                    tensor.record_stream(torch.cuda.current_stream())
            sums.append(_checksums(exchanged))
    for step, (of_step, wanted) in enumerate(zip(sums, expected, strict=True)):
        if of_step.tolist() != wanted:
            raise AssertionError(f"step {step} computed on other bits than were loaded")
    return f"{STREAM_STEPS} steps, each delayed by {DELAY_CYCLES / 1e6:.0f} million cycles"


@contextmanager
def group_of_one(device: torch.device) -> Iterator[str]:
    """While active, the default process group is this process alone. Yields its backend for the device."""
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


def moved(fields: Mapping[str, Any], device: torch.device, pin: bool = False) -> Fields:
    """Returns the fields on a device, copied from pinned memory without waiting if `pin`."""

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)

    return {name: _with_tensors(value, to_device) for name, value in fields.items()}


def _draw_fields(seed: int, num_rows: int) -> Fields:
    """Draws fields of several kinds and dtypes, with `num_rows` rows, on the host."""
    rng = np.random.default_rng(seed)

    def bits(count: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        num_bytes = count * dtype.itemsize * int(np.prod(shape, dtype=int))
        drawn = rng.integers(0, 2 if dtype == torch.bool else 256, num_bytes, dtype=np.uint8)
        return torch.from_numpy(drawn).view(dtype).view(count, *shape)

    def lengths(keys: int, longest: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, longest, keys * num_rows))

    ids, short, wide = lengths(3, 30), lengths(1, 4).int(), lengths(1, 5)
    count = int(ids.sum())
    return {
        "ids": KeyedJaggedTensor(
            ["item", "action", "user"],
            bits(count, torch.int64),
            weights=bits(count, torch.float32),
            lengths=ids,
            stride=num_rows,
        ),
        "short": KeyedJaggedTensor(
            ["tag"], bits(int(short.sum()), torch.int32), lengths=short, stride=num_rows
        ),
        "images": JaggedTensor(bits(int(wide.sum()), torch.bfloat16, 3, 8), lengths=wide),
        "scores": bits(num_rows, torch.float64, 2),
        "flags": bits(num_rows, torch.bool),
        "bytes": bits(num_rows, torch.uint8, 5),
        "half": bits(num_rows, torch.float16, 3),
        "complex": bits(num_rows, torch.complex64),
    }


def _packed(fields: Fields, num_rows: int) -> PackedRows:
    return PackedRows.pack(fields, RowSchema.of(fields), num_rows)


def _num_elements(fields: Fields) -> list[int]:
    return [len(value.values()) for value in fields.values() if not isinstance(value, torch.Tensor)]


def _reordered(fields: Fields, rows: np.ndarray, num_elements: Sequence[int], padding: int = 0) -> Fields:
    """Packs fields, gathers rows, and unpacks them with rows of padding after them."""
    packed = _packed(fields, len(fields["flags"]))
    return gather_rows([packed], rows, list(num_elements)).unpack(len(rows) + padding)


def _gathering_plan(host: Fields) -> Callable[[Fields], Fields]:
    """Returns a function that sends a third of the rows each through bytes, and gathers from all sources."""
    rng = np.random.default_rng(1)
    schema = RowSchema.of(host)
    elements = row_elements(_packed(host, NUM_ROWS).lengths, schema).numpy()
    chunks = np.split(rng.permutation(NUM_ROWS), 3)
    of_chunks = np.array([elements[chunk].sum(0) for chunk in chunks])
    sizes = aligned(np.array([schema.row_bytes(elements[chunk]).sum() for chunk in chunks])).tolist()
    positions = rng.integers(0, 2 * NUM_ROWS, NUM_ROWS)
    every = np.concatenate([np.arange(NUM_ROWS), *chunks])
    num_elements = elements[every[positions]].sum(0).tolist()

    def gather(fields: Fields) -> Fields:
        rows = _packed(fields, NUM_ROWS)
        buffers = rows.to_chunks(chunks, of_chunks).split(sizes)
        sources = [rows]
        for buffer, chunk, of_chunk in zip(buffers, chunks, of_chunks.tolist(), strict=True):
            sources.append(PackedRows.from_bytes(buffer, schema, len(chunk), of_chunk))
        return gather_rows(sources, positions, num_elements).unpack()

    return gather


def _exchange_plan(host: Fields) -> Callable[[Fields], Fields]:
    """Returns a function that sends all rows through the process group of one rank.

    `transfer` copies the rows that stay on their rank. So this process takes part as rank 1, and all rows go
    to rank 0 and come from it, which is itself.
    """
    from commons.distributed.exchange import transfer
    from commons.distributed.shuffle_plan import Route, RouteEnd

    schema = RowSchema.of(host)
    elements = row_elements(_packed(host, NUM_ROWS).lengths, schema).numpy()
    chunk_bytes = aligned(schema.row_bytes(elements).sum(keepdims=True))
    end = RouteEnd(np.zeros(NUM_ROWS, dtype=np.int64), elements, chunk_bytes)
    return lambda fields: transfer(_packed(fields, NUM_ROWS), Route(end, end), 1, None).unpack()


def _peak_of_gathering(values: torch.Tensor, device: torch.device) -> int:
    num_rows = 1024
    lengths = torch.full((num_rows,), len(values) // num_rows, device=device)
    rows = _packed({"values": JaggedTensor(values, lengths=lengths)}, num_rows)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    gather_rows([rows], np.arange(num_rows)[::-1], [len(values)])
    return torch.cuda.max_memory_allocated(device) - before


def _tensors(fields: Fields) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            yield name, value
            continue
        for part in ("values", "lengths", "weights_or_none"):
            tensor = getattr(value, part)()
            if tensor is not None:
                yield f"{name}.{part}", tensor


def _with_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    weights = value.weights_or_none()
    parts = {
        "values": function(value.values()),
        "lengths": function(value.lengths()),
        "weights": None if weights is None else function(weights),
    }
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(value.keys(), stride=value.stride(), **parts)
    return JaggedTensor(**parts)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _check_same_bits(got: Fields, expected: Fields) -> None:
    for (name, tensor), (_, wanted) in zip(_tensors(got), _tensors(expected), strict=True):
        kinds = [f"{value.dtype} {tuple(value.shape)}" for value in (tensor, wanted)]
        if kinds[0] != kinds[1]:
            raise AssertionError(f"{name} is {kinds[0]}, on the CPU {kinds[1]}")
        different = int((_bytes(tensor.cpu()) != _bytes(wanted)).sum())
        if different:
            raise AssertionError(f"{name} differs from the CPU's in {different} of {wanted.nbytes} bytes")


def _checksums(fields: Fields) -> torch.Tensor:
    """Returns an int64 per tensor that depends on every byte and its place; no synchronization."""
    sums = []
    for _, tensor in _tensors(fields):
        values = _bytes(tensor).long()
        sums.append((values * torch.arange(1, len(values) + 1, device=values.device)).sum())
    return torch.stack(sums)


def _of_what() -> str:
    jagged = "stand-in jagged tensors" if is_stand_in("torchrec") else "TorchRec's jagged tensors"
    return f", with {jagged}"
