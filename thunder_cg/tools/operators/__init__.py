"""The sweep that measures the rules: every operator that Thunder can trace, captured and compared with uncaptured.

A case (an operator) has samples (calls with arguments), and these have draws (values). Some samples of a case are a
task; a worker process compiles them together with Thunder, with the transform and without, and calls both with five
draws: the first warms up, the second captures, and three are fresh values for the replay. What the rules deny is then
captured by force.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from thunder_cg.tools.bench.progress import Progress
from thunder_cg.tools.operators.check import disagreements
from thunder_cg.tools.operators.measure import Record, Task, measure
from thunder_cg.tools.operators.results import Journal, Results, environment
from thunder_cg.tools.operators.samples import Case, cases
from thunder_cg.tools.workers import Parent, Workers

TOGETHER = 24  # samples of a task
SECONDS = 240.0  # for a task; past it the worker is hung
EACH = 100  # tasks of a worker: what Thunder compiled is never all given up, and collecting garbage gets slow


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, and where the results go.

    Attributes:
        jobs: worker processes.
        only: patterns ("add", "linalg_*") that the names of the cases to measure match; all are measured if empty.
        first: samples of each case, at most.
        json: a file for the results. Beside it, `<json>.parts` has what is done so far: a sweep goes on from there, and
            begins anew where there is none.
    """

    device: torch.device
    jobs: int = os.cpu_count() or 1
    only: Sequence[str] = ()
    first: int | None = None
    json: Path | None = None

    @property
    def chosen(self) -> dict[str, Case]:
        every = cases(self.device.type)
        if not self.only:
            return every
        return {name: case for name, case in every.items() if any(fnmatchcase(name, only) for only in self.only)}


def run(settings: Settings) -> int:
    """Measures, and prints a summary. Returns 0, or 1 if all was measured and the rules do not agree.

    Raises:
        ValueError: a pattern matches no case, or `json` has parts from elsewhere.
    """
    chosen = settings.chosen
    for only in settings.only:
        if not any(fnmatchcase(name, only) for name in chosen):
            raise ValueError(f"--only {only!r}: no case has such a name; --list shows all")
    results = Results(environment(settings.device) | {"cuda": torch.version.cuda or ""})
    parts = settings.json.with_name(settings.json.name + ".parts") if settings.json else None
    journal = Journal(parts, results.environment)
    records = list(journal.records())
    for record in _measured(settings, chosen, records):
        journal.add(record)
        records.append(record)
    for record in sorted(records, key=lambda r: r.task):
        results.add(record)
    if settings.json is not None:
        settings.json.write_text(results.to_text(), encoding="utf-8")
    print(summary(results))
    if settings.only:
        return 0
    differing = disagreements([results])
    print(f"{len(differing)} disagreements with the rules", *differing, sep="\n")
    return int(bool(differing))


def _measured(settings: Settings, chosen: dict[str, Case], before: Sequence[Record]) -> Iterator[Record]:
    last = settings.first or 10**9
    done = {record.task for record in before}
    first = [Task(0, name, min(TOGETHER, last)) for name in chosen]
    tasks = [task for task in first if task not in done]
    tasks += [task for record in before if record.task in first for task in _rest(record, last) if task not in done]
    if not tasks:
        return
    workers = Workers(partial(_work, settings.device.type), tasks, settings.jobs, SECONDS, each=EACH)
    progress = Progress(len(tasks))
    for answer in workers.answers():
        record = answer.result or Record(answer.task)
        record.end(answer.failure)
        if record.task.start == 0:
            rest = _rest(record, last)
            workers.add(rest)
            progress.more(len(rest))
        progress.tick(record.task.name)
        yield record
    progress.clear()


def _work(device: str, task: Task, parent: Parent) -> None:
    for record in measure(task, device):
        parent.give(record)
    if device == "cuda" and record.is_forced:  # a library may write to the host's memory whenever it is replayed
        parent.retire()


def _rest(record: Record, last: int) -> list[Task]:
    """What is left to do of a case when its first samples are done."""
    task, end = record.task, min(record.total, last)
    return [Task(start, task.case, min(start + TOGETHER, last)) for start in range(TOGETHER, end, TOGETHER)]


def summary(results: Results) -> str:
    cases = results.cases.values()
    traced, samples = sum(c["traced"] for c in cases), sum(c["samples"] for c in cases)
    ends = Counter(end for counts in results.symbols.values() for end in counts)
    return "\n".join(
        (
            f"{sum(c['traced'] > 0 for c in cases)} of {len(cases)} cases, {traced} of {samples} samples compiled by "
            f"Thunder; {sum(len(c['crashes']) for c in cases)} crashes",
            f"{len(results.symbols)} symbols: {', '.join(f'{n} {end}' for end, n in sorted(ends.items()))}",
        )
    )


__all__ = ["Settings", "run"]
