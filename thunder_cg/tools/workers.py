"""Worker processes for tasks that may crash or hang. A crash costs one task, and its answer says what was under way.

Timed code needs the machine to itself, but the compilation before it uses one core. So several tasks prepare at once;
while a task that asks for its turn has it, the processes of the others are stopped.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.sharedctypes import RawValue
from typing import IO, Any, Generic, TypeVar
from unittest.mock import patch

import torch

from thunder_cg.progress import Progress

STARTUP = 180.0  # seconds for the imports
_PRINTS_STACKS = signal.SIGUSR1
_stood_still: Any = None  # seconds, of this process, if it is a worker; shared with the process that has stopped it
_FRAMES = 6  # of a stack that are shown

T = TypeVar("T")


def failure_text(error: BaseException) -> str:
    """The kind of error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")[:300]


def working_time() -> float:
    """`time.perf_counter`, which stands still while this process does, because another one has its turn."""
    return time.perf_counter() - (_stood_still.value if _stood_still is not None else 0.0)


class Supervisor:
    """The process that sent the task, as the worker sees it."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def report(self, stage: str, ticks: int = 1, timeout: float = math.inf) -> None:
        """Says what begins now, and how many ticks of progress that is. If the process dies, its answer names it.

        Args:
            timeout: seconds until the next report, after which the process counts as hung.
        """
        self._pipe.send(("stage", (stage, ticks, timeout)))

    def send_result(self, result: Any) -> None:
        """Sends the result as far as it is known; the last one counts."""
        self._pipe.send(("result", result))

    def retire(self) -> None:
        """Asks for no further task in this process, because the task may have damaged its state."""
        self._pipe.send(("retire", None))

    def wait_for_turn(self, result: Any = None) -> None:
        """Waits until no other task is at work; what follows has the machine to itself. Sends the result so far."""
        if result is not None:
            self.send_result(result)
        self._pipe.send(("wait", None))
        self._pipe.recv()


class WorkerProgress(Progress):
    """Sends progress to the process that shows it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def tick(self, stage: str, ticks: int = 1) -> None:
        self._supervisor.report(stage, ticks)

    def show(self, stage: str) -> None:
        self._supervisor.report(stage, 0)

    def clear(self) -> None:
        pass


@dataclass(slots=True)
class Answer(Generic[T]):
    """What is known of a task.

    Attributes:
        result: the last result that the worker sent; None if it sent none.
        failure: why the task ended early, "" if it did not.
        hangs: whether that is why, and it was ended.
        stage: what it has reported last.
    """

    task: T
    result: Any = None
    failure: str = ""
    hangs: bool = False
    stage: str = ""


@dataclass(slots=True, eq=False)
class _Worker(Generic[T]):
    process: Any
    pipe: connection.Connection
    output: IO[bytes]
    """What the process, and all that it started, print."""
    stood_still: Any
    """Seconds, in memory that both processes share."""
    answer: Answer[T] | None = None
    stage: str = ""
    tasks_begun: int = 0
    deadline: float = field(default_factory=lambda: time.monotonic() + STARTUP)
    stage_began: float = 0.0
    stage_timeout: float = math.inf
    ready: bool = False
    waits: bool = False

    @property
    def busy(self) -> bool:
        return self.answer is not None and not self.waits

    def send(self, message: Any) -> None:
        with suppress(OSError):  # the process has died; the next read from the pipe reports that
            self.pipe.send(message)

    def signal(self, number: int) -> None:
        """Sends a signal to the process and to all that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            if self.process.is_alive():  # it has just begun, and has no group yet
                os.kill(self.process.pid, number)

    @property
    def ends(self) -> float:
        """When it counts as hung."""
        return min(self.deadline, self.stage_began + self.stage_timeout)

    def where(self) -> str:
        """What its main thread runs, innermost first, even if it never returns from there."""
        known = size = os.path.getsize(self.output.name)
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, _PRINTS_STACKS)
        for _ in range(10):  # until it has printed all
            time.sleep(0.5)
            before, size = size, os.path.getsize(self.output.name)
            if known < before == size:
                break
        with open(self.output.name, encoding="utf-8", errors="replace") as file:
            file.seek(known)
            *_, stack = file.read().split("hread 0x")  # that of the main thread is the last
        frames = re.findall(r'File ".*?([^/"]+/[^/"]+)", line (\d+) in (\S+)', stack)[:_FRAMES]
        return "in " + " < ".join(f"{function} ({file}:{line})" for file, line, function in frames)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()
        self.output.close()


_environment = threading.Lock()  # held while the variables of this process are those of a new one


class Workers(Generic[T]):
    """A number of processes, and the tasks that wait for one.

    Args:
        work: does a task. It is a function of a module, so that it can be pickled; tasks and results are pickled, too.
        jobs: tasks at work at once.
        timeout: seconds for a task, and again for what follows its turn. After them, the process counts as hung.
        tasks_per_process: after so many tasks, a process is replaced.
        environment: variables for the processes.
        on_progress: called with a task, its stage and the ticks that its worker reports.
        on_result: called with a task and each result that its worker sends.
    """

    def __init__(
        self,
        work: Callable[[T, Supervisor], None],
        tasks: Sequence[T],
        jobs: int,
        timeout: float,
        tasks_per_process: int = 1,
        environment: Mapping[str, str] | None = None,
        on_progress: Callable[[T, str, int], None] = lambda task, stage, ticks: None,
        on_result: Callable[[T, Any], None] = lambda task, result: None,
    ) -> None:
        self._work = work
        self._tasks = deque(tasks)
        self._jobs = jobs
        self._timeout = timeout
        self._tasks_per_process = tasks_per_process
        self._environment = environment or {}
        self._on_progress = on_progress
        self._on_result = on_result
        self._workers: list[_Worker[T]] = []

    def add(self, tasks: Sequence[T]) -> None:
        """Appends tasks to those that wait for a process."""
        self._tasks.extend(tasks)

    def answers(self) -> Generator[Answer[T], None, None]:
        """The answers as they come, one for each task.

        Raises:
            RuntimeError: processes cannot even be started.
        """
        try:
            while self._tasks or any(worker.answer for worker in self._workers):
                self._begin()
                yield from self._receive([worker for worker in self._workers if worker.busy])
                for worker in [worker for worker in self._workers if worker.waits]:
                    yield from self._give_turn(worker)
        finally:
            for worker in self._workers:
                worker.end()

    def _give_turn(self, worker: _Worker[T]) -> Iterator[Answer[T]]:
        """Takes what a worker sends until its task is done, while the others stand still."""
        others, begin = [other for other in self._workers if other.busy], time.monotonic()
        for other in others:
            other.signal(signal.SIGSTOP)
        worker.waits, worker.deadline, worker.stage_began = False, begin + self._timeout, begin
        worker.send("go")
        try:
            while worker.busy:
                yield from self._receive([worker])
        finally:
            taken = time.monotonic() - begin
            for other in others:
                other.deadline += taken
                other.stage_began += taken
                other.stood_still.value += taken
                other.signal(signal.SIGCONT)

    def _begin(self) -> None:
        while self._tasks and sum(worker.busy for worker in self._workers) < self._jobs:
            worker = next((worker for worker in self._workers if worker.answer is None), None) or self._start()
            worker.answer, worker.stage, worker.stage_timeout = Answer(self._tasks.popleft()), "", math.inf
            worker.tasks_begun += 1
            worker.output.truncate(0)
            if worker.ready:
                worker.deadline = time.monotonic() + self._timeout
            worker.send(worker.answer.task)

    def _start(self) -> _Worker[T]:
        context = get_context("spawn")
        pipe, its_pipe = context.Pipe()
        output = tempfile.NamedTemporaryFile()  # noqa: SIM115
        stood_still = RawValue("d", 0.0)
        process = context.Process(target=_serve, args=(its_pipe, output.name, self._work, stood_still), daemon=True)
        resource_tracker.ensure_running()  # a process that starts it gives it its variables, and allows the signal
        # Threads share the variables of this process. What a worker imports before it serves prints here.
        with _environment, patch.dict(os.environ, {"PYTHONWARNINGS": "ignore", **self._environment}):
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process alone
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its_pipe.close()
        self._workers.append(_Worker(process, pipe, output, stood_still))
        return self._workers[-1]

    def _receive(self, busy: Sequence[_Worker[T]]) -> Iterator[Answer[T]]:
        """Takes one message of each worker that has sent one, and gives up those whose time is over."""
        left = min(worker.ends for worker in busy) - time.monotonic()
        readable = connection.wait([worker.pipe for worker in busy], max(0.0, left))
        for worker in busy:
            if worker.pipe in readable:
                yield from self._take_message(worker)
            elif time.monotonic() > worker.ends:
                limit = min(self._timeout, worker.stage_timeout) if worker.ready else STARTUP
                yield self._died(worker, f"no result within {limit:g} s", hangs=True)

    def _take_message(self, worker: _Worker[T]) -> Iterator[Answer[T]]:
        assert worker.answer is not None
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            yield self._died(worker, f"the process ended with status {worker.process.exitcode}")
            return
        if kind == "ready":
            worker.ready = True
            worker.deadline = time.monotonic() + self._timeout
        elif kind == "stage":
            worker.stage, ticks, worker.stage_timeout = content
            worker.stage_began = time.monotonic()
            self._on_progress(worker.answer.task, worker.stage, ticks)
        elif kind == "result":
            worker.answer.result = content
            self._on_result(worker.answer.task, content)
        elif kind == "retire":
            worker.tasks_begun = self._tasks_per_process
        elif kind == "wait":
            worker.waits = True
        elif kind == "raised":
            yield self._finish(worker, content)
        else:
            yield self._finish(worker)

    def where(self) -> list[tuple[T, str]]:
        """What those do that are at work: what they reported last, and what they run."""
        at_work = [(worker, worker.answer) for worker in self._workers if worker.answer is not None and worker.ready]
        return [(answer.task, ", ".join(filter(None, (worker.stage, worker.where())))) for worker, answer in at_work]

    def _died(self, worker: _Worker[T], how: str, *, hangs: bool = False) -> Answer[T]:
        with open(worker.output.name, encoding="utf-8", errors="replace") as file:
            why = ": ".join([", ".join(filter(None, (how, worker.stage))), *_last_output(file)])[:300]
        if not worker.ready:
            raise RuntimeError(f"a worker does not start: {why}")
        return self._finish(worker, f"{why}, {worker.where()}" if hangs else why, hangs=hangs)

    def _finish(self, worker: _Worker[T], failure: str = "", *, hangs: bool = False) -> Answer[T]:
        answer, worker.answer = worker.answer, None
        assert answer is not None
        if failure or worker.tasks_begun == self._tasks_per_process:
            self._workers.remove(worker)
            worker.end()
        return replace(answer, failure=failure, hangs=hangs, stage=worker.stage)


def _last_output(lines: Iterable[str]) -> list[str]:
    """The last line that a process printed, and the line of Python in which it crashed, if that is known."""
    printed = [line.strip() for line in lines if line.strip()]
    crash = next((i for i, line in enumerate(printed) if line.startswith("Fatal Python error")), len(printed))
    where = [line for line in printed[crash:] if line.startswith("File ")]
    return [*printed[:crash][-1:], *where[:1]]


def _serve(pipe: connection.Connection, output: str, work: Callable[[Any, Supervisor], None], stood_still: Any) -> None:
    """The main function of a worker: does the tasks that come, until the pipe is closed."""
    global _stood_still
    _stood_still = stood_still
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(2)
    faulthandler.register(_PRINTS_STACKS, 2)
    torch.set_num_threads(1)
    pipe.send(("ready", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            work(task, Supervisor(pipe))
        except Exception as error:  # after a CUDA error the process cannot use the device any more
            pipe.send(("raised", failure_text(error)))
            return
        pipe.send(("done", None))
