"""The benchmark: each model under eager PyTorch, Thunder, its own CUDA graphs, this package, torch.compile, and more.

The floor is the model's eager kernels in one hand-made CUDA graph with nothing around its replay. All variants of a
model are measured in one process, in turns, so that what is compared saw the same machine: ratios count, not
microseconds.
"""

from __future__ import annotations

import faulthandler
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path

import torch

from thunder_cg.tools.bench.cases import SWEEPS, Case, Sweep, cases
from thunder_cg.tools.bench.goals import goals
from thunder_cg.tools.bench.measure import Row, measure_case, ticks
from thunder_cg.tools.bench.models import optional
from thunder_cg.tools.bench.plots import write_plots
from thunder_cg.tools.bench.processes import Task, measured
from thunder_cg.tools.bench.progress import Progress
from thunder_cg.tools.bench.report import goals_table, sweeps, table
from thunder_cg.tools.bench.results import Point, Results, results_for
from thunder_cg.tools.bench.variants import FLOOR, OURS, THUNDER, THUNDER_OWN, variants

SWEPT = (THUNDER, THUNDER_OWN, OURS, FLOOR)
LARGEST = 100  # past it, a sweep leaves out what only serves to compare: Thunder compiles for a minute and more


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, and where the numbers go.

    Attributes:
        quick: a few small cases and calls.
        only: measure the cases and sweeps whose names hold this.
        calls: of a turn, at most; None for 100, or 10 if `quick`.
        jobs: how many cases are prepared at once, each in a process of its own; with 1, all are in this one.
        json: a file for the numbers. Those that it has of other cases, from this machine, stay in it.
        plots: a folder for plots of all that is in `json`.
    """

    device: torch.device
    quick: bool = False
    only: str = ""
    calls: int | None = None
    jobs: int = 1
    json: Path | None = None
    plots: Path | None = None

    @property
    def chosen(self) -> list[Case | Sweep]:
        everything: tuple[Case | Sweep, ...] = (*cases(self.device, self.quick), *SWEEPS)
        return [each for each in everything if self.only in each.name]

    def sizes(self, sweep: Sweep) -> tuple[int, ...]:
        return sweep.small if self.quick or self.device.type != "cuda" else sweep.sizes

    def names(self, size: int = 0) -> list[str]:
        """The variants of a case, or of a sweep at some size."""
        names = [*variants(self.device)]
        if size:
            names = [name for name in names if name in SWEPT]
        return [name for name in names if name in (OURS, FLOOR)] if size > LARGEST else names


def run(settings: Settings) -> int:
    """Measures, and prints tables and goals; the numbers are written after each case. Returns 0.

    Raises:
        ValueError: the settings do not fit: nothing is chosen, or `json` has numbers from elsewhere.
        ModuleNotFoundError: plots are wanted and matplotlib is not installed.
    """
    if not settings.chosen:
        raise ValueError(f"--only {settings.only}: no case has that in its name; --list shows all")
    if settings.plots is not None:
        optional("matplotlib")
    results = results_for(settings.json, settings.device)
    with suppress(OSError, AttributeError):  # where standard error is no file
        faulthandler.enable()  # with one job, nobody else says where it crashed
    _measure_all(settings, results)
    if goals(results):
        print(goals_table(goals(results)))
    if settings.plots is not None:
        for path in write_plots(results, settings.plots):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _measure_all(settings: Settings, results: Results) -> None:
    tasks = [task for each in settings.chosen for task in _tasks(settings, each)]
    progress = Progress(sum(task.ticks for task in tasks))
    swept: set[str] = set()
    left = Counter(task.arguments[1] for task in tasks)
    for task, rows in _rows(settings, tasks, progress):
        _, sweep, size = task.arguments
        left[sweep] -= 1
        if sweep is None:
            results.add(rows)
        else:
            found = [Point(sweep, size, row.variant, row.host_p50, row.failure) for row in rows]
            results.add_points(found, again=sweep not in swept)
            swept.add(sweep)
        _save(settings, results)
        progress.clear()
        if sweep is None:
            print(table(rows), flush=True)
        elif not left[sweep]:
            points = [point for point in results.points if point.unit == sweep]
            print(sweeps(Results(results.environment, points=points)), flush=True)


def _tasks(settings: Settings, each: Case | Sweep) -> list[Task]:
    if isinstance(each, Case):
        return [Task(each.name, ticks(settings.names()), _measure, (replace(settings, only=each.name), None, 0))]
    return [
        Task(each.case(size).name, ticks(settings.names(size)), _measure, (settings, each.unit, size))
        for size in settings.sizes(each)
    ]


def _rows(settings: Settings, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[Task, list[Row]]]:
    if settings.jobs > 1:
        yield from measured(tasks, settings.jobs, progress)
        return
    _warm_up(settings)
    for task in tasks:
        yield task, task.measure(*task.arguments, progress=progress)


def _save(settings: Settings, results: Results) -> None:
    if settings.json is not None:
        results.write(settings.json, [asdict(goal) | {"met": goal.met} for goal in goals(results)])


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, PyTorch gets one thread: such small models are no slower, and a busy machine disturbs them less."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warm_up(settings: Settings) -> None:
    """What a process pays once, such as loading kernels and the compiler, is not to count for the first case."""
    names = settings.names(1)
    measure_case(SWEEPS[0].case(1), settings.device, names, 1, Progress(ticks(names), StringIO()), compare=False)


def _measure(
    settings: Settings, unit: str | None, size: int, progress: Progress, ready: Callable[[], None] | None = None
) -> list[Row]:
    """Measures a case, which `settings.only` names, or one size of a sweep.

    Args:
        ready: given in a process of its own: called once all is prepared.
    """
    if ready is not None:
        _warm_up(settings)
    if unit is None:
        case = next(each for each in settings.chosen if isinstance(each, Case) and each.name == settings.only)
    else:
        case = next(sweep for sweep in SWEEPS if sweep.unit == unit).case(size)
    calls = settings.calls or (10 if settings.quick else 100)
    with _one_thread(settings.device):
        return measure_case(
            case,
            settings.device,
            settings.names(size),
            calls,
            progress,
            compare=unit is None,
            ready=ready or (lambda: None),
        )


__all__ = ["Settings", "run"]
