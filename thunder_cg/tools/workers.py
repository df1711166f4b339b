"""Processes that measure. One that crashes or hangs costs the task that it was at, and says what it was doing.

What is timed must have the machine to itself, and what comes before that is compilation, on one core: several tasks are
prepared at once, and those that ask for their turn then go on one by one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context
from typing import IO, Any, Generic, TypeVar
from unittest.mock import patch

import torch

STARTUP = 180.0  # seconds for the imports

T = TypeVar("T")


class Parent:
    """Who sent the task, as the work on it sees them."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def say(self, doing: str, ticks: int = 1) -> None:
        """What is begun, so that somebody knows in what a process died, and how much that is."""
        self._pipe.send(("say", (doing, ticks)))

    def give(self, result: Any) -> None:
        """The result as far as it is known; the last one counts."""
        self._pipe.send(("give", result))

    def retire(self) -> None:
        """No other task is to be done in this process: what was done here may have spoilt it."""
        self._pipe.send(("retire", None))

    def wait(self) -> None:
        """Waits until nothing else is at work."""
        self._pipe.send(("wait", None))
        self._pipe.recv()


@dataclass(slots=True)
class Answer(Generic[T]):
    """What is known of a task.

    Attributes:
        result: what its work gave last; None if nothing.
        failure: why there is no more, "" if there is.
        final: False if it only waits for its turn.
    """

    task: T
    result: Any = None
    failure: str = ""
    final: bool = False


@dataclass(slots=True, eq=False)
class _Worker(Generic[T]):
    process: Any
    pipe: connection.Connection
    words: IO[bytes]
    """What it, and what it started, print."""
    answer: Answer[T] | None = None
    doing: str = ""
    begun: int = 0
    deadline: float = field(default_factory=lambda: time.monotonic() + STARTUP)
    ready: bool = False
    waits: bool = False

    @property
    def busy(self) -> bool:
        return self.answer is not None and not self.waits

    def send(self, what: Any) -> None:
        with suppress(OSError):  # it is gone, which the next message says
            self.pipe.send(what)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with all that it started
        self.process.kill()  # it may not have got to have a group
        self.process.join()
        self.pipe.close()
        self.words.close()


class Workers(Generic[T]):
    """A number of processes, and the tasks that wait for one.

    Args:
        work: does a task; of a module, so that it can be pickled, as can tasks and what is given.
        jobs: tasks at work at once.
        seconds: for a task, and again for what follows its turn; past them its process is hung.
        held: processes at once, those that wait for their turn included; 0 for as many as `jobs`.
        each: how many tasks a process gets, one after the other, before it is replaced.
        environment: variables for the processes.
        heard: told what a task says.
    """

    def __init__(
        self,
        work: Callable[[T, Parent], None],
        tasks: Sequence[T],
        jobs: int,
        seconds: float,
        held: int = 0,
        each: int = 1,
        environment: Mapping[str, str] | None = None,
        heard: Callable[[T, str, int], None] = lambda task, doing, ticks: None,
    ) -> None:
        self._work = work
        self._tasks = deque(tasks)
        self._jobs = jobs
        self._seconds = seconds
        self._held = held or jobs
        self._each = each
        self._environment = environment or {}
        self._heard = heard
        self._workers: list[_Worker[T]] = []

    def add(self, tasks: Sequence[T]) -> None:
        """These come after all that wait."""
        self._tasks.extend(tasks)

    def answers(self) -> Iterator[Answer[T]]:
        """The answer to each task as they come; twice if it waits for its turn.

        Raises:
            RuntimeError: processes cannot even be started.
        """
        try:
            while self._tasks or any(worker.answer for worker in self._workers):
                yield from self._prepare()
                for worker in [each for each in self._workers if each.waits]:
                    worker.waits = False
                    worker.deadline = time.monotonic() + self._seconds
                    worker.send("go")
                    while worker.busy:
                        yield from self._hear([worker])
        finally:
            for worker in self._workers:
                worker.end()

    def _prepare(self) -> Iterator[Answer[T]]:
        """Until all tasks are done or wait for their turn, or there is no room for more."""
        while True:
            self._begin()
            busy = [worker for worker in self._workers if worker.busy]
            if not busy:
                return
            yield from self._hear(busy)

    def _begin(self) -> None:
        while self._tasks and sum(worker.busy for worker in self._workers) < self._jobs:
            worker = next((each for each in self._workers if each.answer is None), None)
            if worker is None:
                if len(self._workers) == self._held:
                    return
                worker = self._start()
            worker.answer, worker.doing = Answer(self._tasks.popleft()), ""
            worker.begun += 1
            worker.words.truncate(0)
            if worker.ready:
                worker.deadline = time.monotonic() + self._seconds
            worker.send(worker.answer.task)

    def _start(self) -> _Worker[T]:
        context = get_context("spawn")
        pipe, theirs = context.Pipe()
        words = tempfile.NamedTemporaryFile()  # noqa: SIM115
        process = context.Process(target=_serve, args=(theirs, words.name, self._work), daemon=True)
        with patch.dict(os.environ, self._environment):
            process.start()
        theirs.close()
        self._workers.append(_Worker(process, pipe, words))
        return self._workers[-1]

    def _hear(self, busy: Sequence[_Worker[T]]) -> Iterator[Answer[T]]:
        """Takes a message of each that has one, or finds one to be hung."""
        left = min(worker.deadline for worker in busy) - time.monotonic()
        spoke = connection.wait([worker.pipe for worker in busy], max(0.0, left))
        for worker in busy:
            if worker.pipe in spoke:
                yield from self._take(worker)
            elif time.monotonic() > worker.deadline:
                yield self._failed(worker, f"no result within {self._seconds if worker.ready else STARTUP:g} s")

    def _take(self, worker: _Worker[T]) -> Iterator[Answer[T]]:
        assert worker.answer is not None
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            yield self._failed(worker, f"the process ended with status {worker.process.exitcode}")
            return
        if kind == "ready":
            worker.ready = True
            worker.deadline = time.monotonic() + self._seconds
        elif kind == "say":
            worker.doing = content[0]
            self._heard(worker.answer.task, *content)
        elif kind == "give":
            worker.answer.result = content
        elif kind == "retire":
            worker.begun = self._each
        elif kind == "wait":
            worker.waits = True
            yield replace(worker.answer)
        elif kind == "raised":
            yield self._ended(worker, content)
        else:
            yield self._ended(worker)

    def _failed(self, worker: _Worker[T], how: str) -> Answer[T]:
        with open(worker.words.name, encoding="utf-8", errors="replace") as file:
            why = ": ".join([", ".join(filter(None, (how, worker.doing))), *_last_words(file)])[:300]
        if not worker.ready:
            raise RuntimeError(f"a worker does not start: {why}")
        return self._ended(worker, why)

    def _ended(self, worker: _Worker[T], failure: str = "") -> Answer[T]:
        answer, worker.answer = worker.answer, None
        assert answer is not None
        if failure or worker.begun == self._each:
            self._workers.remove(worker)
            worker.end()
        return replace(answer, failure=failure, final=True)


def _last_words(lines: Iterable[str]) -> list[str]:
    """The last line that a process printed, and where in Python it crashed, if it could say so."""
    said = [line.strip() for line in lines if line.strip()]
    crash = next((i for i, line in enumerate(said) if line.startswith("Fatal Python error")), len(said))
    where = [line for line in said[crash:] if line.startswith("File ")]
    return [*said[:crash][-1:], *where[:1]]


def _serve(pipe: connection.Connection, words: str, work: Callable[[Any, Parent], None]) -> None:
    """A worker: does what it is sent, until nobody sends any more."""
    os.setsid()
    said = os.open(words, os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.enable(2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pipe.send(("ready", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            work(task, Parent(pipe))
        except Exception as error:  # the device may be of no more use to this process
            pipe.send(("raised", f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")[:300]))
            return
        pipe.send(("done", None))


__all__ = ["Answer", "Parent", "Workers"]
