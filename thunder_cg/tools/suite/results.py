"""The result file of the model suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thunder_cg.tools.results import MeasuredResults, with_row
from thunder_cg.tools.suite.row import MODES, SuiteRow

NOTE = (
    "Times in microseconds: medians of synchronised steps, uncaptured Thunder and captured in turns in one process; 0 "
    "where not measured. SuiteRow in thunder_cg/tools/suite/row.py says the rest."
)
PACKAGES = ("transformers", "torchvision", "timm", "litgpt", "diffusers")


@dataclass(slots=True)
class SuiteResults(MeasuredResults):
    """All rows of one machine."""

    rows: list[SuiteRow] = field(default_factory=list)

    def add(self, row: SuiteRow, order: Sequence[str]) -> None:
        """Adds a row, in place of an earlier one of the same model and mode; `order` is that of the models."""
        place = {name: index for index, name in enumerate(order)}
        self.rows = with_row(self.rows, row, lambda r: (place.get(r.model, len(place)), r.model, MODES.index(r.mode)))

    def to_dict(self) -> dict[str, Any]:
        return {"environment": self.environment, "note": NOTE, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SuiteResults:
        return cls(content["environment"], [SuiteRow.from_dict(row) for row in content["rows"]])
