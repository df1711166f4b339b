"""Processes that are the ranks of one process group, and that many tests share: to start them takes seconds."""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch

STARTUP = 240.0  # seconds for the imports, beside other tests on two cores
COLLECTIVE = 60.0  # seconds that a collective may take


class Ranks:
    """``size`` processes with a gloo or NCCL group. A task that fails or hangs ends them all; the next starts new ones.

    Args:
        device: ``"cpu"`` for gloo, ``"cuda"`` for NCCL with one GPU for each rank.
        spawns: whether Python starts anew in each rank, with hashes of its own. It always does where there are GPUs.
    """

    def __init__(self, size: int, device: str, collective: float = COLLECTIVE, *, spawns: bool = False) -> None:
        self.size, self.device, self._collective = size, device, collective
        # A fork server imports once what takes seconds. But what it imports begins to use CUDA, which no fork survives.
        self._method = "spawn" if spawns or torch.cuda.is_available() else "forkserver"
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def run(self, task: Callable[..., Any], *args: Any, timeout: float = 90.0) -> list[Any]:
        """What ``task(*args)`` returns on each rank. AssertionError with the tracebacks if a rank raises or hangs."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((task.__module__, task.__qualname__, args))
        return self._answers(timeout, f"{task.__name__}{args}")

    def _start(self) -> None:
        context = get_context(self._method)
        context.set_forkserver_preload(
            ["thunder", "thunder_cg", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor"]
        )
        folder = tempfile.mkdtemp()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            arguments = (rank, self.size, self.device, f"{folder}/store", self._collective, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self._answers(STARTUP, "start")

    def _answers(self, timeout: float, what: str) -> list[Any]:
        results, problems = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                ok, value = pipe.recv() if pipe.poll(timeout) else (False, f"no answer within {timeout} s")
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(10)
                ok, value = False, f"the process ended with {self._processes[rank].exitcode}"
            results.append(value)
            if not ok:
                problems.append(f"rank {rank}: {value}")
                timeout = min(timeout, 3 * self._collective)  # the others may wait for this rank
        if problems:
            self.close()
            raise AssertionError(f"{what}\n" + "\n".join(problems))
        return results

    def end(self, timeout: float) -> list[int | None]:
        """Has Python end in each process. Returns the exit codes, None for a process that goes on."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout)
        return [process.exitcode for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, device: str, store: str, collective: float, pipe: connection.Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    if device == "cuda":
        torch.cuda.set_device(rank)
    import thunder  # noqa: F401

    import thunder_cg  # noqa: F401

    importlib.import_module("speed")
    gc.collect()
    gc.freeze()  # as common.py has it
    begin_group(rank, size, device, store, collective)
    pipe.send((True, None))
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def begin_group(rank: int, size: int, device: str, store: str, collective: float = COLLECTIVE) -> None:
    kind = {"backend": "nccl", "device_id": torch.device("cuda", rank)} if device == "cuda" else {"backend": "gloo"}
    Path(store).parent.mkdir(exist_ok=True)
    limit = datetime.timedelta(seconds=collective)
    torch.distributed.init_process_group(
        rank=rank, world_size=size, init_method=f"file://{store}", timeout=limit, **kind
    )
