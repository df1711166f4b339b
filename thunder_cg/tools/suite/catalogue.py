"""Catalogues: models by name, in a module's `MODELS`. What the tools share that measure each row in its own process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        way: the mode or the variant to measure the model in.
    """

    catalogue: str
    model: str
    way: str
    device: torch.device

    @property
    def entry(self) -> Any:
        """The model, as the catalogue has it."""
        return importlib.import_module(self.catalogue).MODELS[self.model]


Work = Callable[[RowTask, Supervisor], None]
NoRow = Callable[[RowTask], Any]


@dataclass(frozen=True, slots=True)
class CatalogueSettings:
    """The models to measure, in how many processes, and where the rows go.

    Attributes:
        catalogue: the module whose `MODELS` are measured.
        only: the models that have one of these in their names, in upper or lower case.
        jobs: rows that are prepared at once. Rows are timed one by one.
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
        self, work: Work, no_row: NoRow, results: RowResults, ways: Callable[[Any], Sequence[str]], order: Sequence[str]
    ) -> Iterator[Any]:
        """Measures, and yields the rows as they come, which are then in the results and in `json`.

        Args:
            work: measures the row of a task, and sends it.
            no_row: makes a row of a task that has sent none.
            ways: the modes or variants of a model.
            order: that of all modes or variants in the results.

        Raises:
            ValueError: no model is chosen.
        """
        models = self.chosen()
        tasks = [RowTask(self.catalogue, model.name, way, self.device) for model in models for way in ways(model)]
        progress = Progress(len(tasks))
        progress.show(f"{len(tasks)} rows")
        for task, row in measure_all(tasks, work, no_row, self.jobs, self.timeout):
            results.add([row], [*self._models()], order)
            if self.json is not None:
                results.write(self.json)
            progress.tick(f"{task.model}, {task.way}")
            progress.clear()
            yield row


def measure_all(
    tasks: Sequence[RowTask], work: Work, no_row: NoRow, jobs: int, timeout: float
) -> Iterator[tuple[RowTask, Any]]:
    """The rows as they come. One that finds no memory is measured once more after the others."""
    workers = Workers(work, tasks, jobs, timeout, environment=ENVIRONMENT)
    without_memory: set[RowTask] = set()
    for answer in workers.answers():
        task, row = answer.task, answer.result or no_row(answer.task)
        row.failure = answer.failure or row.failure
        if "OutOfMemoryError" in row.failure and task not in without_memory:
            without_memory.add(task)
            workers.add([task])
        else:
            yield task, row
