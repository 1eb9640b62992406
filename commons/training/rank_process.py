"""Lifecycle of a rank's process: its process group, its device, and its exit."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..distributed.ranks import cause_elsewhere
from ..first_cause import GRACE_S, show_first_cause_only


@contextmanager
def rank_process() -> Iterator[torch.device]:
    """Joins torchrun's process group, and leaves it when all ranks are done.

    Uses gloo, and NCCL for GPU tensors if there are GPUs. Without torchrun, the process is the only rank.

    Yields:
        This rank's device.

    Raises:
        RuntimeError: a launcher started several tasks without torchrun, which would each train alone.
    """
    if "WORLD_SIZE" not in os.environ:
        _check_alone()
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        # TorchRec's communicator and the exchange's share the device. NCCL reads it when it starts.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        # No device_id: with it, NCCL would split subgroups off a group, which needs all ranks of the group.
        _join("cpu:gloo,cuda:nccl")
    else:
        device = torch.device("cpu")
        _join("gloo")
    show_first_cause_only()  # for programs that do not use `run_rank`
    yield device
    # If a gloo process ends while others still talk to it, all of them abort.
    dist.barrier()
    dist.destroy_process_group()


def _check_alone() -> None:
    """Raises a RuntimeError if a launcher, such as srun or mpirun, started more tasks than this one."""
    if os.environ.get("RANK", "0") != "0":
        raise RuntimeError(
            f"RANK is {os.environ['RANK']}, and WORLD_SIZE is not set: start ranks by torchrun"
        )
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (tasks := os.environ.get(variable, "1")) != "1":
            raise RuntimeError(
                f"{variable} is {tasks}, and WORLD_SIZE is not set, so that each of the {tasks} tasks would "
                "train alone: start one torchrun on each node, as in srun --ntasks-per-node=1 torchrun "
                "--nnodes=$SLURM_NNODES --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 "
                "-m MODULE. To train alone in each task, set WORLD_SIZE=1"
            )


def _join(backend: str) -> None:
    """Creates the default process group, with a fresh store for every restart of the ranks.

    Torchrun reuses its store when it restarts ranks, so they would find each other's old addresses.
    """
    store = _agent_store()
    if store is None:
        dist.init_process_group(backend)
        return
    store.set_timeout(default_pg_timeout)  # ranks may create a group at very different times
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt_{_attempt()}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def run_rank(main: Callable[[], None]) -> None:
    """Runs `main` and exits, with code 1 after a failure. Shows only the first failure of all ranks.

    When a rank fails, the others soon fail in their next collective. Only the rank that failed first prints a
    traceback. The others print one line, and give torchrun time to end them. Elastic's `@record` would print
    every rank's traceback, and print it again from its error file.

    The process exits without cleanup. After a failure, cleanup would wait for the other ranks. After a
    success, gloo's threads may abort during the interpreter's cleanup (about one run in thirty).
    """
    try:
        main()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        _show(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show(error: Exception) -> None:
    """Prints a traceback on the rank that fails first. Other ranks print one line, then wait for torchrun."""
    rank, line = os.environ.get("RANK", "0"), cause_elsewhere(error)
    if line is not None:
        print(line, file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
    if _fails_first():
        print(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
    elif line is None:
        print(f"rank {rank} failed, too: {type(error).__name__}", file=sys.stderr, flush=True)
        time.sleep(GRACE_S)


def _fails_first() -> bool:
    """Returns whether this rank is the first of this attempt to ask."""
    try:
        store = _agent_store()
        return store is None or store.add(f"balanced_training/failures/{_attempt()}", 1) == 1
    except Exception:  # the store may be gone; showing a failure twice beats hiding it
        return True


def _attempt() -> str:
    """Returns the number of times torchrun has restarted the ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent_store() -> dist.Store | None:
    """Returns torchrun's store, which outlives the ranks, or None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
