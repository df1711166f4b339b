"""Runs the benchmark: the cases and scaling series that were chosen, in this process or each in its own."""

from __future__ import annotations

import faulthandler
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from thunder_cg.files import refuse_foreign
from thunder_cg.progress import Progress
from thunder_cg.tools.bench.cases import SCALING, BenchmarkCase, ScalingSeries, cases
from thunder_cg.tools.bench.measure import EVERY_VARIANT, BenchmarkRow, measure_case, ticks
from thunder_cg.tools.bench.models import optional
from thunder_cg.tools.bench.plots import NAMES, write_plots
from thunder_cg.tools.bench.report import scaling_tables, table
from thunder_cg.tools.bench.results import BenchmarkResults, ScalingPoint
from thunder_cg.tools.bench.variants import FLOOR, OURS, THUNDER, THUNDER_OWN, CaseSettings, variants
from thunder_cg.tools.measuring import one_thread
from thunder_cg.tools.results import environment
from thunder_cg.tools.workers import Supervisor, WorkerProgress, Workers

IN_SCALING = (THUNDER, THUNDER_OWN, OURS, FLOOR)
LARGEST = 100  # larger sizes leave out variants that only serve to compare: Thunder compiles for a minute and more
TIMEOUT = 1800.0  # seconds to prepare a case, and again to time it


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSettings(CaseSettings):
    """Cases and scaling series to measure on one device: with one job in this process, else each in its own.

    Attributes:
        plots: a folder for plots of all that is in `json`.
    """

    plots: Path | None = None

    @property
    def chosen(self) -> list[BenchmarkCase | ScalingSeries]:
        everything: tuple[BenchmarkCase | ScalingSeries, ...] = (*cases(self.device, self.quick), *SCALING)
        return [each for each in everything if self.has(each.name)]

    def cases(self) -> dict[str, BenchmarkCase]:
        """The chosen cases by name, those of the sizes of scaling series too."""
        small = self.quick or self.device.type != "cuda"
        several = ([each] if isinstance(each, BenchmarkCase) else each.cases(small=small) for each in self.chosen)
        return {case.name: case for found in several for case in found}

    def chosen_variants(self, size: int = 0) -> list[str]:
        """The variants of a case; `size` is that of a case of a scaling series."""
        names = self.meant(variants(self.device))
        if size:
            names = [name for name in names if name in IN_SCALING]
        return [name for name in names if name in (OURS, FLOOR)] if size > LARGEST else names


Measure = Callable[..., list[BenchmarkRow]]


@dataclass(frozen=True, slots=True)
class BenchmarkTask:
    """A case. `measure(*arguments, progress=, ready=)` measures it; it is pickled."""

    name: str
    ticks: int
    measure: Measure
    arguments: tuple[Any, ...]


def run(settings: BenchmarkSettings) -> int:
    """Measures, and prints tables. It writes the numbers after each case. Returns 0.

    Raises:
        ValueError: the settings do not fit: nothing is chosen, or `json` or a plot is
            somebody else's, or from another machine.
        ModuleNotFoundError: plots are wanted and matplotlib is not installed.
    """
    if not settings.chosen:
        raise ValueError(f"no case has {' or '.join(map(repr, settings.names))} in its name; --list shows all")
    if not settings.chosen_variants():
        known = ", ".join(variants(settings.device))
        raise ValueError(
            f"--variants {' '.join(settings.variants)}: no variant has that in its name; there are {known}"
        )
    if settings.plots is not None:
        optional("matplotlib")
        for name in NAMES:
            refuse_foreign(settings.plots / name)
    results = BenchmarkResults.read_or_new(settings.json, environment(settings.device))
    with suppress(OSError, AttributeError):  # where standard error is no file
        faulthandler.enable()  # with one job, no other process can say where this one crashed
    _measure_all(settings, results)
    if settings.plots is not None:
        for path in write_plots(results, settings.plots):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _measure_all(settings: BenchmarkSettings, results: BenchmarkResults) -> None:
    cases = settings.cases()
    tasks = [
        BenchmarkTask(name, ticks(settings.chosen_variants(case.size)), _measure, (settings, name))
        for name, case in cases.items()
    ]
    progress = Progress(sum(task.ticks for task in tasks))
    begun: set[str] = set()
    left = Counter(case.unit for case in cases.values())
    for task, rows in _rows(settings, tasks, progress):
        unit, size = cases[task.name].unit, cases[task.name].size
        left[unit] -= 1
        if not unit:
            results.add(rows)
        else:
            points = [ScalingPoint(unit, size, row.variant, row.host_p50, row.failure) for row in rows]
            results.add_points(points, again=unit not in begun)
            begun.add(unit)
        if settings.json is not None:
            results.write(settings.json)
        progress.clear()
        if not unit:
            print(table(rows), flush=True)
        elif not left[unit]:
            points = [point for point in results.points if point.unit == unit]
            print(scaling_tables(BenchmarkResults(results.environment, points=points)), flush=True)


Measured = Iterator[tuple[BenchmarkTask, list[BenchmarkRow]]]


def _rows(settings: BenchmarkSettings, tasks: Sequence[BenchmarkTask], progress: Progress) -> Measured:
    if settings.jobs > 1:
        yield from measure_in_processes(tasks, settings.jobs, progress)
        return
    _warm_up(settings)
    for task in tasks:
        yield task, task.measure(*task.arguments, progress=progress)


def measure_in_processes(tasks: Sequence[BenchmarkTask], jobs: int, progress: Progress) -> Measured:
    """Measures each task in a process of its own, and yields the rows as they come.

    A CUDA error makes its process useless, and a C++ error ends it: either costs one task.

    Args:
        jobs: tasks that prepare at once. They are timed one by one.
    """
    ticked: Counter[str] = Counter()

    def on_progress(task: BenchmarkTask, stage: str, ticks: int) -> None:
        ticked[task.name] += ticks
        progress.tick(stage, ticks)

    for answer in Workers(_work, tasks, jobs, TIMEOUT, on_progress=on_progress).answers():
        task = answer.task
        progress.tick(f"{task.name}: done", task.ticks - ticked[task.name])
        yield task, answer.result or [BenchmarkRow(task.name, EVERY_VARIANT, failure=answer.failure)]


def _work(task: BenchmarkTask, supervisor: Supervisor) -> None:
    progress = WorkerProgress(supervisor)
    supervisor.send_result(task.measure(*task.arguments, progress=progress, ready=supervisor.wait_for_turn))


def _warm_up(settings: BenchmarkSettings) -> None:
    """Runs a small case, so that the first case does not pay for loading kernels and the compiler."""
    names = settings.chosen_variants(1)
    measure_case(SCALING[0].case(1), settings.device, names, 1, Progress(ticks(names), StringIO()), compare=False)


def _measure(
    settings: BenchmarkSettings, name: str, progress: Progress, ready: Callable[[], None] | None = None
) -> list[BenchmarkRow]:
    """Measures the case of this name.

    Args:
        ready: called once all variants are prepared; None if this process is not the measurement's own.
    """
    if ready is not None:
        _warm_up(settings)
    case = settings.cases()[name]
    calls = settings.calls or (10 if settings.quick else 100)
    with one_thread() if settings.device.type == "cpu" else nullcontext():
        return measure_case(
            case,
            settings.device,
            settings.chosen_variants(case.size),
            calls,
            progress,
            compare=not case.unit,
            ready=ready or (lambda: None),
        )
