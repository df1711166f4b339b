"""The sweep that measures the rules: every operator that Thunder can trace, captured and compared with uncaptured.

A case (an operator) has samples (calls with arguments), and these have draws (values). Some samples of a case are a
task; a worker process compiles them together with Thunder, with the transform and without, and calls both with five
draws: the first warms up, the second captures, and three are fresh values for the replay. What the rules deny is then
captured by force.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thunder_cg.bench.progress import Progress
from thunder_cg.sweep.measure import Record, Task
from thunder_cg.sweep.results import Journal, Results, environment
from thunder_cg.sweep.samples import Case, cases
from thunder_cg.sweep.workers import Workers

TOGETHER = 24  # samples of a task


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, and where the results go.

    Attributes:
        jobs: worker processes.
        only: the names of cases to measure; all if empty.
        first: samples of each case, at most.
        json: a file for the results. Beside it, `<json>.parts` has what is done so far, and goes when all is done.
    """

    device: torch.device
    jobs: int = os.cpu_count() or 1
    only: Sequence[str] = ()
    first: int | None = None
    json: Path | None = None

    @property
    def chosen(self) -> dict[str, Case]:
        every = cases(self.device.type)
        return {name: every[name] for name in self.only or every if name in every}


def run(settings: Settings) -> int:
    """Measures, and prints a summary. Returns 0.

    Raises:
        ValueError: no case has a name that was given.
    """
    chosen = settings.chosen
    unknown = [name for name in settings.only if name not in chosen]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: no case has that name; --list shows all")
    journal = Journal(settings.json.with_name(settings.json.name + ".parts") if settings.json else None)
    results = Results(environment(settings.device))
    records = list(journal.records())
    for record in _measured(settings, chosen, records):
        journal.add(record)
        records.append(record)
    for record in sorted(records, key=lambda r: r.task):
        results.add(record)
    if settings.json is not None:
        settings.json.write_text(results.to_text(), encoding="utf-8")
    print(summary(results))
    return 0


def _measured(settings: Settings, chosen: dict[str, Case], before: Sequence[Record]) -> Iterator[Record]:
    last = settings.first or 10**9
    done = {record.task for record in before}
    first = [Task(0, name, False, min(TOGETHER, last)) for name in chosen]
    first += [Task(0, name, True, min(TOGETHER, last)) for name, case in chosen.items() if case.differentiable]
    tasks = [task for task in first if task not in done]
    tasks += [task for record in before if record.task in first for task in _rest(record, last) if task not in done]
    if not tasks:
        return
    workers = Workers(settings.device.type, settings.jobs, tasks)
    progress = Progress(len(tasks))
    for record in workers.records():
        if record.task.start == 0:
            rest = _rest(record, last)
            workers.add(rest)
            progress.more(len(rest))
        progress.tick(record.task.name)
        yield record
    progress.clear()


def _rest(record: Record, last: int) -> list[Task]:
    """What is left to do of a case when its first samples are done."""
    task, end = record.task, min(record.total, last)
    return [
        Task(start, task.case, task.grad, min(start + TOGETHER, last)) for start in range(TOGETHER, end, TOGETHER)
    ]


def summary(results: Results) -> str:
    cases = results.cases.values()
    outcomes = ("pass", "nondeterministic", "wrong", "fail")
    lines = [
        f"{sum(c['traced'] > 0 for c in cases)} of {len(results.cases)} cases traced, "
        f"{sum(c['traced'] for c in cases)} of {sum(c['samples'] for c in cases)} samples",
        f"{len(results.symbols)} symbols: "
        + ", ".join(
            f"{sum(any(k.split()[-1] == o and not k.startswith('forced') for k in s) for s in results.symbols.values())}"
            f" {o}"
            for o in outcomes
        ),
        f"crashes: {sum(len(c.get('crashes', ())) for c in cases)}",
    ]
    return "\n".join(lines)


__all__ = ["Settings", "run"]
