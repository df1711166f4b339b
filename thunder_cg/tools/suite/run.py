"""Runs the model suite."""

from __future__ import annotations

from thunder_cg.compat.torch_compile import dynamo_recompile_limit
from thunder_cg.tools.results import environment
from thunder_cg.tools.suite.catalogue import CatalogueSettings, RowTask
from thunder_cg.tools.suite.measure import measure
from thunder_cg.tools.suite.results import MODES, PACKAGES, SuiteResults, SuiteRow
from thunder_cg.tools.suite.table import line, markdown
from thunder_cg.tools.workers import Supervisor

CATALOGUE = "thunder_cg.tools.suite.models"


def run(settings: CatalogueSettings) -> int:
    """Measures, and prints a line for each row, then the table.

    Returns:
        1 if the results of a model differ from those of uncaptured Thunder, else 0.

    Raises:
        ValueError: the settings do not fit: nothing is chosen, or `json` has rows from elsewhere.
    """
    results = SuiteResults.read_or_new(settings.json, environment(settings.device, PACKAGES))
    differ = False
    for row in settings.measured(work, no_row, results, lambda model: zip(model.modes), MODES):
        print(line(row), flush=True)
        differ = differ or row.agrees.startswith("no")
    print(f"\n{markdown(results.rows, results.environment)}")
    return int(differ)


def work(task: RowTask, supervisor: Supervisor) -> None:
    """Measures a row and sends it, in a process of its own."""
    with dynamo_recompile_limit(64):  # several compiled copies share the model's code
        row = measure(task.entry, task.ways[0], task.device, supervisor.wait_for_turn, supervisor.report)
    supervisor.send_result([row])


def no_row(task: RowTask, mode: str) -> SuiteRow:
    return SuiteRow(task.model, task.entry.package, mode)
