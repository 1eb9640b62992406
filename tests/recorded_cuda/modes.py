"""A CPU that answers as a GPU would: tensors whose storage is marked are on `cuda:0`.

While `recorded_cuda` is active, the Python of torch, of TorchRec and ours takes every branch for GPUs. C++
sees CPU tensors, so results are the CPU's to the bit. Models are made on the CPU, and adopted.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nested._internal.nested_tensor import NestedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .clocks import DEVICE, Access, Event, Memory, Stream

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_WAITED_FOR = (
    "_local_scalar_dense equal nonzero masked_select _unique2 unique_dim unique_consecutive bincount"
)
_WAITS = {f"aten::{name}" for name in _WAITED_FOR.split()}  # the host waits for their results
_EMPTY = "empty empty_like new_empty empty_strided new_empty_strided"
_ALLOCATES = {f"aten::{name}" for name in _EMPTY.split()}
_COPIES_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_within = threading.local()


@contextmanager
def flag(name: str, value: bool) -> Iterator[None]:
    """Has a flag of this thread be set while it is active."""
    before = getattr(_within, name, False)
    setattr(_within, name, value)
    try:
        yield
    finally:
        setattr(_within, name, before)


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Returns what is known of the storage of a tensor; None for the host's."""
    try:
        return getattr(tensor.untyped_storage(), "recorded", None)
    except (RuntimeError, NotImplementedError):  # it has none
        return None


def on_device(tensor: Any) -> bool:
    """Returns whether a tensor is in device memory."""
    memory = memory_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return memory is not None and memory.kind == "device"


def mark(tensor: torch.Tensor, kind: str = "device") -> torch.Tensor:
    """Has a tensor's storage be of a kind of memory, and returns the tensor."""
    tensor.untyped_storage().recorded = DEVICE.allocate(kind)  # type: ignore[attr-defined]
    return tensor


def access(tensor: torch.Tensor, writes: bool) -> Access | None:
    """Returns the bytes that a tensor spans in known memory."""
    memory = memory_of(tensor)
    if memory is None or not tensor.numel():
        return None
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.dtype.itemsize
    return Access(memory, start * size, (start + last + 1) * size, writes)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Returns the tensors in arguments, lists of them included."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def launch(name: str, reads: Any, writes: Any, stream: Stream | None = None) -> None:
    """Records a kernel."""
    accesses = [access(tensor, False) for tensor in tensors_in(reads)]
    accesses += [access(tensor, True) for tensor in tensors_in(writes)]
    DEVICE.kernel(name, [each for each in accesses if each], stream)


class Kernels(TorchDispatchMode):
    """Records each operation on device memory as one kernel on the current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, NestedTensor) for each in types):
            return NotImplemented  # it asks again for its parts
        with torch._C.DisableTorchFunction():  # the answers here are those of the CPU
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in(args, kwargs)
        name = func._schema.name
        if not any(on_device(tensor) for tensor in given):
            out = func(*args, **kwargs)
            if not given and getattr(_within, "autograd", False):
                _adopt_new(tensors_in(out))  # made by a formula of autograd, in C++
            _check_host(name, _written(func, args, kwargs), given)
            return out
        before = {tensor.untyped_storage()._cdata for tensor in given if memory_of(tensor) is not None}
        out = func(*args, **kwargs)
        if name.startswith("c10d::"):
            if not getattr(_within, "collective", False):  # of DDP's reducer, which calls it from C++
                _adopt_new(given)
                launch(name, given, given)
                _launched("reducer", name)
            return out
        written = _written(func, args, kwargs)
        _adopt_new(written)  # buckets of DDP's reducer, which C++ allocates
        results = tensors_in(out)
        new = [each for each in results if each.numel() and each.untyped_storage()._cdata not in before]
        new = [each for each in new if memory_of(each) is None]
        for tensor in results:
            if tensor.untyped_storage()._cdata not in before and memory_of(tensor) is None:
                mark(tensor)
        if name in _ALLOCATES or not (new or written or name in _WAITS):
            return out  # a view, or nothing to do
        self._check_arguments(name, given)
        launch(name, given, written + new)
        if name in _WAITS or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
            DEVICE.wait(name)
        return out

    def _check_arguments(self, name: str, given: list[torch.Tensor]) -> None:
        """Finds what would raise on a GPU, or wait there."""
        for tensor in given:
            if tensor.dim() and tensor.numel() and not on_device(tensor):
                if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
                    DEVICE.wait(f"{name} by indices on the host")
                elif name != "aten::copy_":
                    DEVICE.find(f"{name} gets a tensor on the host")


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (index, each.name) for index, each in arguments if each.alias_info and each.alias_info.is_write
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    values = [
        args[index] if index < len(args) else kwargs.get(name) for index, name in _written_arguments(func)
    ]
    return tensors_in(values)


def _adopt_new(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel() and memory_of(tensor) is None:
            mark(tensor)


def _check_host(name: str, written: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    for tensor in given:
        if span := access(tensor, False):
            is_written = any(tensor is each for each in written)
            DEVICE.on_host(span.memory, span.start, span.end, is_written, name)


class Answers(TorchFunctionMode):
    """Answers what Python asks of tensors as for tensors on a GPU, and moves them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        before, _within.autograd = getattr(_within, "autograd", False), False
        try:
            if (handler := _HANDLERS.get(func)) is not None:
                return handler(func, *args, **kwargs)
            if "device" in kwargs or kwargs.get("pin_memory"):
                return _made(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            _within.autograd = before


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Makes a tensor on the device that is named, or in pinned memory."""
    pinned = kwargs.pop("pin_memory", False)
    device = kwargs.get("device")
    device = torch.device(device) if isinstance(device, str | int) else device
    to_device = device is not None and device.type == "cuda"
    if to_device:
        kwargs["device"] = CPU
    if device is not None and not to_device and any(on_device(tensor) for tensor in tensors_in(args)):
        with _disable_current_modes():  # on the host, of the shape of one on the device
            out = func(*args, **kwargs)
    else:
        out = func(*args, **kwargs)
    if to_device:
        for tensor in tensors_in(out):
            if memory_of(tensor) is None:
                mark(tensor)
                if func not in (torch.empty, torch.empty_like, torch.Tensor.new_empty):
                    launch(func.__name__, [], [tensor])
        if func in _COPIES_FROM_HOST:
            DEVICE.wait(f"torch.{func.__name__} from the host")
    elif pinned:
        mark(out, "pinned")
    return out


def _to(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.to`, between devices."""
    copies = kwargs.pop("copy", False)
    target, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    dtype = dtype or tensor.dtype
    if target is None or (target.type == "cuda") == on_device(tensor):
        return func(tensor, dtype, copy=copies)
    return _moved(tensor, dtype, target.type == "cuda", non_blocking)


def _moved(tensor: torch.Tensor, dtype: torch.dtype, to_device: bool, non_blocking: bool) -> torch.Tensor:
    with _disable_current_modes():
        moved = tensor.to(dtype, copy=True)
    if to_device:
        memory = memory_of(tensor)
        mark(moved)
        waits = memory is None or memory.kind != "pinned" or not non_blocking
        launch("copy to device", [] if waits else [tensor], [moved])
        if waits:
            DEVICE.wait("copy from pageable memory" if non_blocking else "blocking copy to the device")
        return moved
    if non_blocking:
        mark(moved, "host")
    launch("copy to host", [tensor], [moved])
    if not non_blocking:
        DEVICE.wait("copy to the host")
    return moved


def _cpu(func: Any, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    return _moved(tensor, tensor.dtype, False, False) if on_device(tensor) else tensor


def _pin(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    memory = memory_of(tensor)
    if memory is not None and memory.kind == "pinned":
        return tensor
    with _disable_current_modes():
        return mark(tensor.clone(), "pinned")


def _is_pinned(func: Any, tensor: torch.Tensor, *args: Any) -> bool:
    memory = memory_of(tensor)
    return memory is not None and memory.kind == "pinned"


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    memory = memory_of(tensor)
    if memory is not None and memory.kind == "device":
        memory.recorded.add(stream.id)
    elif tensor.numel():
        DEVICE.find("record_stream of a tensor on the host")


def _read(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`tolist`, and what gives numpy the memory: not seen below."""
    if on_device(tensor):
        if func is not torch.Tensor.tolist:
            DEVICE.find(f"{func.__name__} of a tensor on the device")
        launch("copy to host", [tensor], [])
        DEVICE.wait(func.__name__)
    elif span := access(tensor, False):
        DEVICE.on_host(span.memory, span.start, span.end, False, func.__name__)
    return func(tensor, *args, **kwargs)


def _copy(func: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`Tensor.copy_`, between devices."""
    here, there = on_device(to), on_device(source)
    if here == there or not to.numel():
        return func(to, source)
    with _disable_current_modes():
        func(to, source)
    other = memory_of(source if here else to)
    waits = not non_blocking or (here and (other is None or other.kind != "pinned"))
    if not here and not waits and other is None:
        mark(to, "host")
    launch("copy", source if there or not waits else [], to if here or not waits else [])
    if waits:
        DEVICE.wait("copy_ between devices")
    return to


def _device(func: Any, tensor: torch.Tensor) -> torch.device:
    return CUDA if on_device(tensor) else func(tensor)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.device.__get__: _device,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda func, tensor: on_device(tensor),  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda func, tensor: not on_device(tensor),  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda func, tensor: 0 if on_device(tensor) else -1,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.tolist: _read,
    torch.Tensor.numpy: _read,
    torch.Tensor.__array__: _read,
    torch.Tensor.copy_: _copy,
}


class RecordedWork(dist.Work):
    """A collective on the stream of its group, which holds its tensors until it has been waited for."""

    def __init__(self, work: Any, event: Event, tensors: list[torch.Tensor], stream: Stream) -> None:
        super().__init__()
        self._work, self._event, self._tensors = work, event, tensors
        for tensor in tensors:
            if memory := memory_of(tensor):
                memory.recorded.add(stream.id)

    def wait(self, *args: Any) -> bool:
        """Orders the current stream after it."""
        self._work.wait(*args)
        self._event.wait()
        self._tensors = []
        return True


def _launched(group: str, name: str) -> None:
    """Notes a collective of the device; threads that launch them race with each other."""
    DEVICE.launches.append((group, name))
    if threading.current_thread() is not threading.main_thread():
        DEVICE.find(f"{name} of group {group} is launched in a thread")


_COLLECTIVES = (  # each writes its first argument
    *("all_to_all_single", "all_to_all", "all_gather_into_tensor", "all_gather"),
    *("reduce_scatter_tensor", "reduce_scatter", "all_reduce", "broadcast"),
)
_streams_of_groups: dict[str, Stream] = {}


def _collective(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a collective that runs as NCCL's: on the current stream; if asynchronous, on its group's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tensors_in(args, kwargs)
        if getattr(_within, "collective", False) or not any(on_device(tensor) for tensor in given):
            return function(*args, **kwargs)  # torch calls one from another
        group = kwargs.get("group") or next(
            (each for each in args if isinstance(each, dist.ProcessGroup)), dist.group.WORLD
        )
        with flag("collective", True), _disable_current_modes():
            work = function(*args, **kwargs)
        written = tensors_in(args[0] if args else next(iter(kwargs.values())))
        _launched(group.group_name, name)
        for tensor in given:
            if tensor.numel() and not on_device(tensor):
                DEVICE.find(f"{name} gets a tensor on the host")
        if work is None:
            launch(name, given, written)
            return None
        stream = _streams_of_groups.setdefault(group.group_name, Stream(name=f"group {group.group_name}"))
        stream.wait_stream(DEVICE.current)
        launch(name, given, written, stream)
        return RecordedWork(work, stream.record_event(), given, stream)

    return call


_ADOPTED = {"torch", "torchrec", "fbgemm_gpu", "commons", "tests", "hstu", "sid_gr"}  # packages


def adopt(model: torch.nn.Module) -> torch.nn.Module:
    """Puts a model that was made on the CPU on the device: its tensors, and what it takes for its device."""
    seen: set[int] = set()
    todo: list[Any] = [model]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter):
            if memory_of(value) is None and value.numel():
                mark(value)
        elif isinstance(value, list | tuple | set):
            todo.extend(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif type(value).__module__.split(".")[0] in _ADOPTED:
            held = getattr(value, "__dict__", {})
            for name, each in list(held.items()):
                if isinstance(each, torch.device) and each.type == "cpu":
                    held[name] = CUDA
            todo.extend(held.values())
    return model


@contextmanager
def recorded_cuda() -> Iterator[Any]:
    """While active, the process has a GPU; yields its record."""
    gc.collect()  # frees the memory of earlier ones
    DEVICE.clear()
    patches: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "Stream": Stream,
            "Event": Event,
            "stream": DEVICE.on,
            "current_stream": lambda device=None: DEVICE.current,
            "default_stream": lambda device=None: DEVICE.default,
            "synchronize": lambda device=None: DEVICE.wait("torch.cuda.synchronize"),
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": lambda device: nullcontext(),
        },
        torch.Tensor: {"record_stream": _record_stream},  # it asks no mode about a stream of another type
        dist: {
            "get_backend_config": lambda group=None: "cpu:gloo,cuda:nccl",
            "new_group": _new_group(dist.new_group),
        },
    }
    for module in (torch.autograd, torch.autograd.graph):
        patches[module] = {"_engine_run_backward": _in_modes_again(torch.autograd.graph._engine_run_backward)}
    for module in (dist, dist.distributed_c10d):
        for name in _COLLECTIVES:
            patches.setdefault(module, {})[name] = _collective(name, getattr(module, name))
    with ExitStack() as stack:
        for target, names in patches.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _in_modes(threading.Thread.run)))
        stack.enter_context(Answers())
        stack.enter_context(Kernels())
        yield DEVICE


def _in_modes(run: Callable[..., None]) -> Callable[..., None]:
    """Modes are of a thread; gives them to threads that start while they are active."""

    def in_modes(self: threading.Thread) -> None:
        with Answers(), Kernels():
            run(self)

    return in_modes


def _in_modes_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` is a function that the mode has been asked about, and so runs without it."""

    def again(*args: Any, **kwargs: Any) -> Any:
        with Answers(), flag("autograd", True):
            return function(*args, **kwargs)

    return again


def _new_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Groups of the device are gloo's underneath."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return new_group(*args, **kwargs)

    return made
