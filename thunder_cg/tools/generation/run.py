"""Runs it: measures each row in a process of its own, and writes the rows as they come."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thunder_cg.progress import Progress
from thunder_cg.tools.generation.measure import VARIANTS, GenerationRow, measure
from thunder_cg.tools.generation.results import PACKAGES, GenerationResults, differ, markdown
from thunder_cg.tools.results import environment
from thunder_cg.tools.suite.run import ENVIRONMENT, CatalogueSettings
from thunder_cg.tools.workers import Supervisor, Workers


@dataclass(frozen=True, slots=True)
class GenerationSettings(CatalogueSettings):
    """What to measure.

    Attributes:
        tokens: new ones after the prompt; None for 128, or 8 on a CPU.
    """

    catalogue: str = "thunder_cg.tools.generation.models"
    variants: Sequence[str] = VARIANTS
    tokens: int | None = None


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
    new = settings.tokens or (128 if settings.device.type == "cuda" else 8)
    tasks = [
        GenerationTask(settings.catalogue, model.name, variant, settings.device, new)
        for model in settings.chosen()
        for variant in settings.variants
    ]
    results = GenerationResults.read_or_new(settings.json, environment(settings.device, PACKAGES))
    progress = Progress(len(tasks))
    progress.tick(f"{len(tasks)} rows", 0)
    jobs, timeout = settings.jobs, settings.timeout
    workers = Workers(_work, tasks, jobs, timeout, environment=ENVIRONMENT)
    for answer in (answer for answer in workers.answers() if answer.final):
        task, model = answer.task, settings.models[answer.task.model]
        row = answer.result or GenerationRow(task.model, model.package, task.variant, model.batch)
        row.failure = answer.failure
        results.add([row], [*settings.models], VARIANTS)
        if settings.json is not None:
            results.write(settings.json)
        progress.tick(f"{task.model}, {task.variant}{f': {row.failure}' if row.failure else ''}")
    progress.clear()
    print(markdown(results.rows, results.environment))
    return int(bool(differ(results.rows)))


def _work(task: GenerationTask, supervisor: Supervisor) -> None:
    model = importlib.import_module(task.catalogue).MODELS[task.model]
    supervisor.send_result(measure(model, task.variant, task.device, task.new, supervisor.wait_for_turn))
