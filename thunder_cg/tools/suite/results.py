"""The result file of the model suite."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_cg.tools.results import RowResults
from thunder_cg.tools.suite.row import SuiteRow

PACKAGES = ("transformers", "torchvision", "timm", "litgpt", "diffusers")


@dataclass(slots=True)
class SuiteResults(RowResults):
    """All rows of one machine."""

    make_row = SuiteRow.of
    identity = ("model", "mode")
    note = (
        "Times in microseconds: medians of synchronised steps, uncaptured Thunder and captured in turns in one "
        "process; 0 where not measured. SuiteRow in thunder_cg/tools/suite/row.py says the rest."
    )
