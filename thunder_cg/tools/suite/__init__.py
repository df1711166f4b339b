"""Real models that nobody here wrote, with random weights: what of them is captured, what is not and why, whether the
numbers are those of uncaptured Thunder, and how long a step takes.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from thunder_cg.tools.bench.progress import Progress
from thunder_cg.tools.suite.jobs import Job, measure_all
from thunder_cg.tools.suite.models import Entry
from thunder_cg.tools.suite.results import Results, results_for
from thunder_cg.tools.suite.row import MODES
from thunder_cg.tools.suite.table import line, markdown, write_table


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, and where the rows go.

    Attributes:
        only: the models whose names hold this, whatever the case of its letters.
        calls: synchronised steps in a turn, at most.
        jobs: rows in the making at once; None for one on each two processors. They are timed alone.
        timeout: seconds that a row may take to be made, and again to be timed.
        json: a file for the rows; those that it has of other models, from this machine, stay in it.
        catalogue: the module whose `MODELS` are measured.
    """

    device: torch.device
    only: str = ""
    calls: int = 50
    jobs: int | None = None
    timeout: float = 300.0
    json: Path | None = None
    catalogue: str = "thunder_cg.tools.suite.models"

    @property
    def chosen(self) -> list[Entry]:
        models = importlib.import_module(self.catalogue).MODELS
        return [entry for name, entry in models.items() if self.only.lower() in name.lower()]


def run(settings: Settings) -> int:
    """Measures, and prints a line for each row, then the table. Rows are written as they come.

    Returns:
        1 if a model's numbers differ from those of uncaptured Thunder, else 0.

    Raises:
        ValueError: the settings do not fit: nothing is chosen, or `json` has rows from elsewhere.
    """
    if not settings.chosen:
        raise ValueError(f"--only {settings.only}: no model has that in its name; --list shows all")
    results = results_for(settings.json, settings.device)
    order = [*importlib.import_module(settings.catalogue).MODELS]
    jobs = [
        Job(settings.catalogue, entry.name, entry.package, mode, settings.device, settings.calls)
        for entry in settings.chosen
        for mode in MODES
    ]
    progress = Progress(len(jobs))
    progress.tick(f"{len(jobs)} rows", 0)
    wrong = False
    for row in measure_all(jobs, settings.jobs or max(1, (os.cpu_count() or 1) // 2), settings.timeout):
        results.add(row, order)
        if settings.json is not None:
            results.write(settings.json)
        final = settings.device.type != "cuda" or bool(row.failure) or row.captured_us > 0
        progress.tick(f"{row.model}, {row.mode}", int(final))
        if final:
            progress.clear()
            print(line(row), flush=True)
            wrong = wrong or row.agrees.startswith("no")
    progress.clear()
    print(f"\n{markdown(results.rows, results.environment)}")
    return int(wrong)


def rewrite_table(json: Path, markdown_file: Path) -> None:
    """Puts the table of what `json` holds between the marks of a Markdown file. ValueError if that cannot be."""
    if not json.exists():
        raise ValueError(f"--json {json}: there is no such file; it says what the table is to show")
    results = Results.read(json)
    write_table(markdown_file, results.rows, results.environment)


__all__ = ["Settings", "rewrite_table", "run"]
