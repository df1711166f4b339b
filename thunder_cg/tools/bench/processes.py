"""Measures each case in a process of its own: a CUDA error spoils its whole process, and a C++ error ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_cg.tools.bench.measure import EVERY_VARIANT, Row
from thunder_cg.tools.bench.progress import Progress
from thunder_cg.tools.workers import Parent, Workers

SECONDS = 1800.0  # to prepare a case, and again to time it

Measure = Callable[..., list[Row]]


@dataclass(frozen=True, slots=True)
class Task:
    """A case to measure. `measure(*arguments, progress=, ready=)` does it; all of it can be pickled."""

    name: str
    ticks: int
    measure: Measure
    arguments: tuple[Any, ...]


def measured(tasks: Sequence[Task], jobs: int, progress: Progress) -> Iterator[tuple[Task, list[Row]]]:
    """Measures all tasks, `jobs` of which prepare at once, and gives each with its rows, as they come."""
    ticked: Counter[str] = Counter()

    def heard(task: Task, doing: str, ticks: int) -> None:
        ticked[task.name] += ticks
        progress.tick(doing, ticks)

    for answer in Workers(_work, tasks, jobs, SECONDS, heard=heard).answers():
        if answer.final:
            task = answer.task
            progress.tick(f"{task.name}: done", task.ticks - ticked[task.name])
            yield task, answer.result or [Row(task.name, EVERY_VARIANT, failure=answer.failure)]


class _Told(Progress):
    """Progress that is shown elsewhere."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent

    def tick(self, doing: str, ticks: int = 1) -> None:
        self._parent.say(doing, ticks)

    def clear(self) -> None:
        pass


def _work(task: Task, parent: Parent) -> None:
    parent.give(task.measure(*task.arguments, progress=_Told(parent), ready=parent.wait))
