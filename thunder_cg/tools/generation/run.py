"""Runs it: measures each row in a process of its own, and writes the rows as they come."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thunder_cg.tools.generation.measure import VARIANTS, GenerationRow, measure
from thunder_cg.tools.generation.results import PACKAGES, GenerationResults, differ, markdown
from thunder_cg.tools.progress import Progress
from thunder_cg.tools.results import environment
from thunder_cg.tools.suite.run import ENVIRONMENT
from thunder_cg.tools.workers import Supervisor, Workers


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What to measure, and where the rows go.

    Attributes:
        only: the models that have this in their names, in upper or lower case.
        tokens: new ones after the prompt; None for 128, or 8 on a CPU.
        jobs: rows that are prepared at once; None for one on each two processors. Rows are timed one by one.
        timeout: seconds to prepare a row, and again to time it.
        json: a file for the rows. Its rows of other models stay, if they are from this machine.
        catalogue: the module whose `MODELS` are measured.
    """

    device: torch.device
    only: str = ""
    variants: Sequence[str] = VARIANTS
    tokens: int | None = None
    jobs: int | None = None
    timeout: float = 600.0
    json: Path | None = None
    catalogue: str = "thunder_cg.tools.generation.models"


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """The row that one process measures; `catalogue` is the module that has the model in its `MODELS`."""

    catalogue: str
    model: str
    variant: str
    device: torch.device
    new: int


def run(settings: GenerationSettings) -> int:
    """Measures, and prints the table.

    Returns:
        1 if tokens differ from those of uncaptured Thunder, else 0.

    Raises:
        ValueError: the settings do not fit: nothing is chosen, or `json` has rows from elsewhere.
    """
    models = importlib.import_module(settings.catalogue).MODELS
    new = settings.tokens or (128 if settings.device.type == "cuda" else 8)
    tasks = [
        GenerationTask(settings.catalogue, name, variant, settings.device, new)
        for name in models
        for variant in settings.variants
        if settings.only.lower() in name.lower()
    ]
    if not tasks:
        raise ValueError(f"--only {settings.only}: no model has that in its name; there are {', '.join(models)}")
    results = GenerationResults.read_or_new(settings.json, environment(settings.device, PACKAGES))
    progress = Progress(len(tasks))
    progress.tick(f"{len(tasks)} rows", 0)
    jobs = settings.jobs or max(1, (os.cpu_count() or 1) // 2)
    workers = Workers(_work, tasks, jobs, settings.timeout, max_processes=len(tasks), environment=ENVIRONMENT)
    for answer in (answer for answer in workers.answers() if answer.final):
        task, model = answer.task, models[answer.task.model]
        row = answer.result or GenerationRow(task.model, model.package, task.variant, model.batch)
        row.failure = answer.failure
        results.add(row, [*models])
        if settings.json is not None:
            results.write(settings.json)
        progress.tick(f"{task.model}, {task.variant}{f': {row.failure}' if row.failure else ''}")
    progress.clear()
    print(markdown(results.rows, results.environment))
    return int(bool(differ(results.rows)))


def _work(task: GenerationTask, supervisor: Supervisor) -> None:
    def ready(row: GenerationRow) -> None:
        supervisor.send_result(row)
        supervisor.wait_for_turn()

    model = importlib.import_module(task.catalogue).MODELS[task.model]
    supervisor.send_result(measure(model, task.variant, task.device, task.new, ready))
