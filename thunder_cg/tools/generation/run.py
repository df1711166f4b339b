"""Runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from thunder_cg.compat.torch_compile import dynamo_recompile_limit
from thunder_cg.tools.bench.variants import THUNDER_OWN
from thunder_cg.tools.generation.measure import VARIANTS, GenerationRow, measure
from thunder_cg.tools.generation.results import PACKAGES, GenerationResults, differ, markdown
from thunder_cg.tools.results import environment
from thunder_cg.tools.suite.catalogue import CatalogueSettings, RowTask
from thunder_cg.tools.workers import Supervisor

CATALOGUE = "thunder_cg.tools.generation.models"


def run(settings: CatalogueSettings, variants: Sequence[str] = VARIANTS) -> int:
    """Measures, and prints the rows that failed, then the table.

    Returns:
        1 if tokens differ from those of uncaptured Thunder, else 0.

    Raises:
        ValueError: the settings do not fit: nothing is chosen, or `json` has rows from elsewhere.
    """
    results = GenerationResults.read_or_new(settings.json, environment(settings.device, PACKAGES))
    for row in settings.measured(_work, _no_row, results, lambda model: together(variants), VARIANTS):
        if row.failure:
            print(f"{row.model}, {row.variant}: {row.failure}", flush=True)
    print(markdown(results.rows, results.environment))
    return int(bool(differ(results.rows)))


def together(variants: Sequence[str]) -> list[tuple[str, ...]]:
    """The variants that take turns in one process: all but Thunder's own graphs.

    These write to workspaces of cuBLAS that torch.compile frees when it records a graph, as for each new cache.
    """
    apart = tuple(name for name in variants if name == THUNDER_OWN)
    others = tuple(name for name in variants if name != THUNDER_OWN)
    return [each for each in (apart, others) if each]


def _work(task: RowTask, supervisor: Supervisor) -> None:
    begins = partial(supervisor.report, timeout=task.timeout)
    with dynamo_recompile_limit(64):  # the variants share the model's code
        supervisor.send_result(measure(task.entry, task.ways, task.device, begins, supervisor.wait_for_turn))


def _no_row(task: RowTask, variant: str) -> GenerationRow:
    return GenerationRow(task.model, task.entry.package, variant, task.entry.batch)
