"""Runs the model suite: measures each row in a process of its own, and writes the rows as they come."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from thunder_cg.compat.torch_compile import dynamo_recompile_limit
from thunder_cg.progress import Progress
from thunder_cg.tools.arguments import JOBS
from thunder_cg.tools.results import environment
from thunder_cg.tools.suite.measure import measure
from thunder_cg.tools.suite.results import MODES, PACKAGES, SuiteResults, SuiteRow
from thunder_cg.tools.suite.table import line, markdown
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

    @property
    def models(self) -> Mapping[str, Any]:
        models: Mapping[str, Any] = importlib.import_module(self.catalogue).MODELS
        return models

    def chosen(self) -> list[Any]:
        """The models that `only` chooses. ValueError if there are none."""
        for text in self.only:
            if not any(text.lower() in name.lower() for name in self.models):
                raise ValueError(f"--only {text}: no model has that in its name; there are {', '.join(self.models)}")
        return [model for name, model in self.models.items() if any(text.lower() in name.lower() for text in self.only)]


@dataclass(frozen=True, slots=True)
class SuiteSettings(CatalogueSettings):
    """What to measure.

    Attributes:
        calls: synchronized steps in a turn, at most.
    """

    catalogue: str = "thunder_cg.tools.suite.models"
    calls: int = 50


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """The row that one process measures.

    Attributes:
        catalogue: the module that has the model in its `MODELS`.
    """

    catalogue: str
    model: str
    package: str
    mode: str
    device: torch.device
    calls: int


def run(settings: SuiteSettings) -> int:
    """Measures, and prints a line for each row, then the table.

    Returns:
        1 if the results of a model differ from those of uncaptured Thunder, else 0.

    Raises:
        ValueError: the settings do not fit: nothing is chosen, or `json` has rows from elsewhere.
    """
    tasks = [
        SuiteTask(settings.catalogue, model.name, model.package, mode, settings.device, settings.calls)
        for model in settings.chosen()
        for mode in model.modes
    ]
    results = SuiteResults.read_or_new(settings.json, environment(settings.device, PACKAGES))
    progress = Progress(len(tasks))
    progress.tick(f"{len(tasks)} rows", 0)
    differ = False
    for row in measure_all(tasks, settings.jobs, settings.timeout):
        results.add([row], [*settings.models], MODES)
        if settings.json is not None:
            results.write(settings.json)
        final = settings.device.type != "cuda" or bool(row.failure) or row.captured_us > 0
        progress.tick(f"{row.model}, {row.mode}", int(final))
        if final:
            progress.clear()
            print(line(row), flush=True)
            differ = differ or row.agrees.startswith("no")
    progress.clear()
    print(f"\n{markdown(results.rows, results.environment)}")
    return int(differ)


def measure_all(tasks: Sequence[SuiteTask], jobs: int, timeout: float) -> Iterator[SuiteRow]:
    """The rows as they come.

    On a GPU each row comes twice: first without times, and again when it was timed, with nothing else at work. A row
    that finds no memory is measured once more after the others.

    Args:
        jobs: rows that are prepared at once.
        timeout: seconds after which the process of a row is ended, and again for its timing.
    """
    workers = Workers(_work, tasks, jobs, timeout, environment=ENVIRONMENT)
    without_memory: set[SuiteTask] = set()
    for answer in workers.answers():
        task, row = answer.task, answer.result or SuiteRow(answer.task.model, answer.task.package, answer.task.mode)
        row = replace(row, failure=answer.failure) if answer.failure else row
        if "OutOfMemoryError" in row.failure and task not in without_memory:
            without_memory.add(task)
            workers.add([task])
        else:
            yield row


def _work(task: SuiteTask, supervisor: Supervisor) -> None:
    model = importlib.import_module(task.catalogue).MODELS[task.model]
    with dynamo_recompile_limit(64):  # several compiled copies share the model's code
        ready, begins = supervisor.wait_for_turn, supervisor.report
        supervisor.send_result(measure(model, task.mode, task.device, task.calls, ready, begins))
