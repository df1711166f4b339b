"""Processes that measure. One that crashes or hangs costs the task that it was at, and is replaced."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any

from thunder_cg.sweep.measure import Record, Task, measure

SECONDS = 240  # for a task; past it the worker is hung
STARTUP = 180

Work = Callable[[Task, str], Iterator[Record]]


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: connection.Connection
    task: Task | None = None
    latest: Record | None = None
    deadline: float = 0.0
    ready: bool = False


class Workers:
    """A number of processes, and the tasks that wait for one. Tasks that a record gives rise to may be added."""

    def __init__(
        self, device: str, jobs: int, tasks: Sequence[Task], work: Work = measure, seconds: float = SECONDS
    ) -> None:
        self._device = device
        self._work = work
        self._seconds = seconds
        self._waiting = list(reversed(tasks))
        self._jobs = min(jobs, len(self._waiting))
        self._context = get_context("spawn")
        self._workers: list[_Worker] = []

    def add(self, tasks: Sequence[Task]) -> None:
        """These come after all that wait."""
        self._waiting = [*reversed(tasks), *self._waiting]

    def records(self) -> Iterator[Record]:
        """The record of each task, as they come."""
        try:
            self._workers = [self._start() for _ in range(self._jobs)]
            while self._waiting or any(worker.task for worker in self._workers):
                yield from self._step()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()

    def _start(self) -> _Worker:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._device, self._work), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, mine, deadline=time.monotonic() + STARTUP)

    def _step(self) -> Iterator[Record]:
        for worker in self._workers:
            if worker.ready and worker.task is None and self._waiting:
                worker.task, worker.latest = self._waiting.pop(), None
                worker.deadline = time.monotonic() + self._seconds
                try:
                    worker.pipe.send(worker.task)
                except OSError:
                    yield self._replace(worker, "the worker was gone")
        ready = connection.wait([worker.pipe for worker in self._workers], timeout=1.0)
        for worker in list(self._workers):
            if worker.pipe in ready:
                record = self._receive(worker)
                if record is not None:
                    yield record
            elif time.monotonic() > worker.deadline and (worker.task is not None or not worker.ready):
                yield self._replace(worker, f"no result within {self._seconds} s")

    def _receive(self, worker: _Worker) -> Record | None:
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            return self._replace(worker, f"the process ended with status {worker.process.exitcode}")
        if kind == "ready":
            worker.ready = True
            return None
        if kind == "so far":
            worker.latest = content
            return None
        if kind == "failed":
            return self._replace(worker, content)
        worker.task = None
        return content

    def _replace(self, worker: _Worker, crash: str) -> Record:
        if worker.task is None:
            raise RuntimeError(f"a worker does not start: {crash}")
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._workers[self._workers.index(worker)] = self._start()
        record = worker.latest or Record(worker.task)
        record.crash = crash
        return record


def _serve(pipe: connection.Connection, device: str, work: Work) -> None:
    """A worker: measures what it is sent, until nobody sends any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what kernels and compilers print is in the errors that they raise
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    pipe.send(("ready", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            *_, last = _sent_on_the_way(pipe, work(task, device))
        except Exception as error:  # the device may be of no more use to this process
            pipe.send(("failed", f"{type(error).__name__}: {error}"[:300]))
            return
        pipe.send(("done", last))


def _sent_on_the_way(pipe: connection.Connection, records: Iterable[Record]) -> Iterator[Record]:
    for record in records:
        pipe.send(("so far", record))
        yield record
