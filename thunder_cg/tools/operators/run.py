"""Runs the operator sweep: gives tasks to worker processes, and writes the results."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from thunder_cg.progress import Progress
from thunder_cg.tools.operators.cases import cases
from thunder_cg.tools.operators.check import disagreements
from thunder_cg.tools.operators.measure import OperatorRecord, OperatorTask, measure
from thunder_cg.tools.operators.results import OperatorResults
from thunder_cg.tools.operators.samples import OperatorCase
from thunder_cg.tools.results import environment
from thunder_cg.tools.workers import Supervisor, Workers

TASK_SAMPLES = 24
TIMEOUT = 240.0  # seconds for a task
# Tasks for one worker process: some of what Thunder compiled is never freed, which makes garbage collection slow.
TASKS_PER_PROCESS = 100


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """What to measure, and where the results go.

    Attributes:
        jobs: worker processes.
        only: patterns ("add", "linalg_*") for the names of the cases to measure; all are measured if empty.
        first: samples of each case, at most.
        json: a file for the results.
    """

    device: torch.device
    jobs: int = os.cpu_count() or 1
    only: Sequence[str] = ()
    first: int | None = None
    json: Path | None = None

    @property
    def chosen(self) -> dict[str, OperatorCase]:
        every = cases(self.device.type)
        if not self.only:
            return every
        return {name: case for name, case in every.items() if any(fnmatchcase(name, only) for only in self.only)}


def run(settings: OperatorSettings) -> int:
    """Measures, and prints a summary. Returns 1 if all cases were measured and the rules disagree, else 0.

    Raises:
        ValueError: a pattern matches no case, or `json` holds something else.
    """
    chosen = settings.chosen
    for only in settings.only:
        if not any(fnmatchcase(name, only) for name in chosen):
            raise ValueError(f"--only {only!r}: no case has such a name; --list shows all")
    OperatorResults.check_writable(settings.json)
    results = OperatorResults(environment(settings.device) | {"cuda": torch.version.cuda or ""})
    for record in sorted(_measured(settings, chosen), key=lambda r: r.task):
        results.add(record)
    if settings.json is not None:
        results.write(settings.json)
    print(summary(results))
    if settings.only:
        return 0
    differing = disagreements([results])
    print(f"{len(differing)} disagreements with the rules", *differing, sep="\n")
    return int(bool(differing))


def _measured(settings: OperatorSettings, chosen: dict[str, OperatorCase]) -> Iterator[OperatorRecord]:
    last = settings.first or 10**9
    tasks = [OperatorTask(0, name, min(TASK_SAMPLES, last)) for name in chosen]
    workers = Workers(
        partial(_work, settings.device.type), tasks, settings.jobs, TIMEOUT, tasks_per_process=TASKS_PER_PROCESS
    )
    progress = Progress(len(tasks))
    for answer in workers.answers():
        record = answer.result or OperatorRecord(answer.task)
        record.end(answer.failure)
        if record.task.start == 0:
            rest = _rest(record, last)
            workers.add(rest)
            progress.more(len(rest))
        progress.tick(record.task.name)
        yield record
    progress.clear()


def _work(device: str, task: OperatorTask, supervisor: Supervisor) -> None:
    for record in measure(task, device):
        supervisor.send_result(record)
    if device == "cuda" and record.is_forced:  # a forced capture may write to the host's memory at each replay
        supervisor.retire()


def _rest(record: OperatorRecord, last: int) -> list[OperatorTask]:
    """The other tasks of a case, whose number of samples its first record says."""
    task, end = record.task, min(record.total, last)
    return [
        OperatorTask(start, task.case, min(start + TASK_SAMPLES, last))
        for start in range(TASK_SAMPLES, end, TASK_SAMPLES)
    ]


def summary(results: OperatorResults) -> str:
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
