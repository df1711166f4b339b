"""Catalogues: models by name, in a module's `MODELS`. What the tools share that measure each in its own processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thunder_cg.progress import Progress
from thunder_cg.tools.arguments import JOBS
from thunder_cg.tools.results import RowResults
from thunder_cg.tools.workers import Supervisor, Workers

# The packages of the models must not use the network, print warnings or start processes. CUBLAS_WORKSPACE_CONFIG makes
# cuBLAS deterministic; cuBLAS reads it when CUDA starts.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


class RowTask(NamedTuple):
    """What one process measures.

    Attributes:
        catalogue: the module that has the model in its `MODELS`.
        ways: the modes or the variants to measure the model in. The worker reports which one it is at.
        timeout: seconds to prepare one of them, and again to time it.
    """

    catalogue: str
    model: str
    ways: tuple[str, ...]
    device: torch.device
    timeout: float

    @property
    def entry(self) -> Any:
        """The model, as the catalogue has it."""
        return importlib.import_module(self.catalogue).MODELS[self.model]


Work = Callable[[RowTask, Supervisor], None]
NoRow = Callable[[RowTask, str], Any]


@dataclass(frozen=True, slots=True)
class CatalogueSettings:
    """The models to measure, in how many processes, and where the rows go.

    Attributes:
        catalogue: the module whose `MODELS` are measured.
        only: the models that have one of these in their names, in upper or lower case.
        jobs: tasks that are prepared at once. They are timed one by one.
        timeout: seconds to prepare a row, and again to time it.
        json: a file for the rows. Its rows of other models stay, if they are from this machine.
    """

    device: torch.device
    catalogue: str
    only: Sequence[str] = ("",)
    jobs: int = JOBS
    timeout: float = 600.0
    json: Path | None = None

    def chosen(self) -> list[Any]:
        """The models that `only` chooses. ValueError if there are none."""
        models = self._models()
        for text in self.only:
            if not any(text.lower() in name.lower() for name in models):
                raise ValueError(f"--only {text}: no model has that in its name; there are {', '.join(models)}")
        return [model for name, model in models.items() if any(text.lower() in name.lower() for text in self.only)]

    def _models(self) -> Mapping[str, Any]:
        models: Mapping[str, Any] = importlib.import_module(self.catalogue).MODELS
        return models

    def measured(
        self,
        work: Work,
        no_row: NoRow,
        results: RowResults,
        ways: Callable[[Any], Iterable[tuple[str, ...]]],
        order: Sequence[str],
    ) -> Iterator[Any]:
        """Measures, and yields the rows as they come, which are then in the results and in `json`.

        Args:
            work: measures the rows of a task, and sends them in a list.
            no_row: makes the row of one way of a task that has sent none.
            ways: the modes or variants of a model; those of one process together.
            order: that of all modes or variants in the results.

        Raises:
            ValueError: no model is chosen.
        """
        models = self.chosen()
        tasks = [
            RowTask(self.catalogue, model.name, together, self.device, self.timeout)
            for model in models
            for together in ways(model)
        ]
        rows = sum(len(task.ways) for task in tasks)
        progress = Progress(rows)
        progress.show(f"{rows} rows")
        for row in measure_all(tasks, work, no_row, self.jobs):
            results.add([row], [*self._models()], order)
            if self.json is not None:
                results.write(self.json)
            progress.tick(", ".join(getattr(row, name) for name in results.identity))
            progress.clear()
            yield row


def measure_all(tasks: Sequence[RowTask], work: Work, no_row: NoRow, jobs: int) -> Iterator[Any]:
    """The rows as they come.

    A process in which one way has failed may be of no use to the others, so they are measured in a new one. A task that
    finds no memory is measured once more after the others.
    """
    timeout = max(len(task.ways) * task.timeout for task in tasks)
    workers = Workers(work, tasks, jobs, timeout, environment=ENVIRONMENT)
    without_memory: set[RowTask] = set()
    for answer in workers.answers():
        task, rows, again = answer.task, answer.result, list[RowTask]()
        if answer.failure:
            failed = answer.stage if answer.stage in task.ways else task.ways[0]
            rows = rows or [no_row(task, failed)]
            rows[0].failure = answer.failure
            if others := tuple(way for way in task.ways if way != failed):
                again = [task._replace(ways=others)]
        if any("OutOfMemoryError" in row.failure for row in rows) and task not in without_memory:
            without_memory.add(task)
            again = [task]
        else:
            yield from rows
        workers.add(again)
