"""The result file of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.results import RowResults


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """Host time of one variant at one size of a scaling series: microseconds (p50) of a synchronised call."""

    unit: str
    size: int
    variant: str
    host_p50: float
    failure: str = ""


@dataclass(slots=True)
class BenchmarkResults(RowResults):
    """All rows and points of one machine."""

    points: list[ScalingPoint] = field(default_factory=list)
    make_row = BenchmarkRow
    identity = ("case",)
    note = (
        "Times in microseconds, unless a name ends in _ms or _s; memory in 1e6 bytes. All variants of a case share "
        "one process, in turns; memory is that of one variant over its model, with those before it in the process. "
        "BenchmarkRow and ScalingPoint in thunder_cg/tools/bench say more."
    )

    def add_points(self, points: Sequence[ScalingPoint], again: bool = True) -> None:
        """Adds points of a scaling series, in place of those of an earlier run if it is measured `again`."""
        units = {point.unit for point in points} if again else set()
        self.points = [point for point in self.points if point.unit not in units] + [*points]

    def to_dict(self) -> dict[str, Any]:
        return {**RowResults.to_dict(self), "sweep": [asdict(point) for point in self.points]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> BenchmarkResults:
        results = super(BenchmarkResults, cls).from_dict(content)
        results.points = [ScalingPoint(**point) for point in content["sweep"]]
        return results
