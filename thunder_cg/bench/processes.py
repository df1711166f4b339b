"""Measures each case in a process of its own: several prepare at once, one at a time is timed, and a crash costs a row.

A CUDA error spoils its whole process, and a C++ error ends it. Preparing is compilation, on one core, and takes most of
the time; what is timed has the machine to itself.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from thunder_cg.bench.measure import EVERY_VARIANT, Row
from thunder_cg.bench.progress import Progress

Measure = Callable[..., list[Row]]


@dataclass(frozen=True, slots=True)
class Task:
    """A case to measure. `measure(*arguments, progress=, ready=)` does it; all of it can be pickled."""

    name: str
    ticks: int
    measure: Measure
    arguments: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Child:
    """A process at work."""

    task: Task
    process: SpawnProcess
    pipe: Connection
    doing: str = "starting"
    ticked: int = 0
    rows: list[Row] | None = None

    @classmethod
    def start(cls, task: Task) -> _Child:
        context = multiprocessing.get_context("spawn")
        pipe, its_end = context.Pipe()
        process = context.Process(target=_work, args=(task, its_end), daemon=True)
        process.start()
        its_end.close()
        return cls(task, process, pipe)

    def hear(self, progress: Progress) -> bool:
        """Takes one message. Returns whether it was the last before the process waits, or ends."""
        try:
            kind, what = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            why = f"its process ended with exit code {self.process.exitcode} while {self.doing}"
            kind, what = "rows", [Row(self.task.name, EVERY_VARIANT, failure=why)]
        if kind == "tick":
            self.doing, ticks = what
            self.ticked += ticks
            progress.tick(self.doing, ticks)
        elif kind == "rows":
            self.rows = what
            progress.tick(f"{self.task.name}: done", self.task.ticks - self.ticked)
            self.process.join()
        return kind != "tick"


def measured(tasks: Sequence[Task], jobs: int, progress: Progress) -> Iterator[tuple[Task, list[Row]]]:
    """Measures all tasks, `jobs` of which prepare at once, and gives each with its rows, as they come."""
    for start in range(0, len(tasks), jobs):
        children = [_Child.start(task) for task in tasks[start : start + jobs]]
        try:
            preparing = {child.pipe: child for child in children}
            while preparing:
                for pipe in wait([*preparing]):
                    if preparing[pipe].hear(progress):  # type: ignore[index]
                        del preparing[pipe]  # type: ignore[arg-type]
            for child in children:
                if child.rows is None:
                    child.pipe.send("go")
                while child.rows is None:
                    child.hear(progress)
                yield child.task, child.rows
        finally:
            for child in children:
                child.process.terminate()


class _Told(Progress):
    """Progress that is shown elsewhere."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tick(self, doing: str, ticks: int = 1) -> None:
        self._pipe.send(("tick", (doing, ticks)))

    def clear(self) -> None:
        pass


def _work(task: Task, pipe: Connection) -> None:
    def ready() -> None:
        pipe.send(("ready", None))
        pipe.recv()

    pipe.send(("rows", task.measure(*task.arguments, progress=_Told(pipe), ready=ready)))
