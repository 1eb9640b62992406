"""The life of one rank's process: its process group, its device, and its end, good or bad."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from commons.distributed.failures import is_copy

_GRACE_S = 2.0  # torchrun looks for ended ranks ten times a second


@contextmanager
def rank_process() -> Iterator[torch.device]:
    """Joins the process group that torchrun describes, and leaves it when all ranks are done.

    NCCL with gloo for host tensors if there are GPUs, else gloo. Without torchrun the process is alone.

    Yields:
        This rank's device.
    """
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        # Without device_id: with it, NCCL splits sub-groups off a group that all its ranks must be in.
        _join("cpu:gloo,cuda:nccl")
    else:
        device = torch.device("cpu")
        _join("gloo")
    yield device
    # A gloo process that ends while others still talk to it aborts, and so do they.
    dist.barrier()
    dist.destroy_process_group()


def _join(backend: str) -> None:
    """Makes the default process group, also where torchrun has restarted the ranks.

    Torchrun then hands out the same store as before, in which ranks would find each other's old addresses.
    """
    store = _agent_store()
    if store is None:
        dist.init_process_group(backend)
        return
    store.set_timeout(default_pg_timeout)  # ranks may be far apart in making a group
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt_{_attempt()}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def run_rank(main: Callable[[], None]) -> None:
    """Runs `main` and ends the process, after a failure with 1; prints the first cause among ranks once.

    When a rank fails, the others fail soon after, in whatever collective they were; only the rank that
    failed first reports. Leaving without clean-up is what stops the others: a clean-up would wait for them.
    After a success Python's own clean-up is left out too: gloo's threads take the GIL to free their last
    collective, and abort the process if by then the interpreter is on its way out (one run in thirty).
    """
    try:
        main()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        if _lost_a_peer(error) or is_copy(error):
            time.sleep(_GRACE_S)  # torchrun ends this rank meanwhile, and names the one that is lost
        _report_first(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether the error may be only the echo of another rank's end."""
    return isinstance(error, dist.DistBackendError) or "gloo/transport" in str(error)


def _report_first(error: BaseException) -> None:
    """Prints the error if no other rank has failed before; else returns once that one's is printed.

    Torchrun ends all ranks as soon as one has left, so the first must have printed by then.
    """
    rank = os.environ.get("RANK", "0")
    text = f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}"
    # Torchrun restarts failed ranks with the same store: one count per attempt.
    prefix = f"balanced_training/failures/{_attempt()}"
    try:
        store = _agent_store()
        if store is not None and store.add(f"{prefix}/count", 1) > 1:
            store.wait([f"{prefix}/printed"], timedelta(seconds=_GRACE_S))
            return
    except Exception:  # better a cause shown twice than not at all
        store = None
    print(text, file=sys.stderr, flush=True)
    if store is not None:
        with suppress(Exception):  # the store may be gone by now; this rank must leave all the same
            store.set(f"{prefix}/printed", "1")


def _attempt() -> str:
    """Which start of the ranks this is."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent_store() -> dist.Store | None:
    """Torchrun's store, which outlives the ranks; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
