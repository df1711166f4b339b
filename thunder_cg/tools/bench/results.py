"""What a benchmark found, as JSON, and how it is added to what an earlier one found on the same machine."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import thunder
import torch

from thunder_cg.tools.bench.measure import Row

NOTE = (
    "Times in microseconds, unless a name ends in _ms or _s; memory in 1e6 bytes. All variants of a case share "
    "one process, in turns; memory is that of one variant over its model, with those before it in the process. Row "
    "and Point in thunder_cg/tools/bench say more."
)


@dataclass(frozen=True, slots=True)
class Point:
    """Host time of one variant at one size of a sweep: microseconds (p50) of a synchronised call."""

    unit: str
    size: int
    variant: str
    host_p50: float
    failure: str = ""


@dataclass(slots=True)
class Results:
    """Everything measured on one machine."""

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def add(self, rows: Sequence[Row]) -> None:
        """Takes the rows of a case; those of an earlier run of it go."""
        again = {row.case for row in rows}
        self.rows = [row for row in self.rows if row.case not in again] + [*rows]

    def add_points(self, points: Sequence[Point], again: bool = True) -> None:
        """Takes points of a sweep; those of an earlier run of it go if it was measured `again`."""
        units = {point.unit for point in points} if again else set()
        self.points = [point for point in self.points if point.unit not in units] + [*points]

    def write(self, path: Path, goals: Sequence[Mapping[str, Any]]) -> None:
        """Writes all of it, and what came of the goals."""
        content = {
            "environment": self.environment,
            "note": NOTE,
            "goals": [*goals],
            "rows": [asdict(row) for row in self.rows],
            "sweep": [asdict(point) for point in self.points],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `write` wrote. ValueError if it is something else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**row) for row in content["rows"]]
            return cls(content["environment"], rows, [Point(**point) for point in content["sweep"]])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold results of this benchmark ({error!r}); name another file") from None


def results_for(path: Path | None, device: torch.device) -> Results:
    """Those in `path`, to be added to, if it is there.

    Raises:
        ValueError: they are from another machine or other versions.
    """
    here = environment(device)
    if path is None or not path.exists():
        return Results(here)
    found = Results.read(path)
    check_environment(path, found.environment, here)
    return Results(here, found.rows, found.points)


def check_environment(path: Path, before: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises ValueError if ``path`` was measured on another machine, or with other versions: times do not compare."""
    for name, value in here.items():
        if name != "date" and before.get(name) != value:
            raise ValueError(
                f"{path} was measured with {name} {before.get(name)}, here it is {value}; name another file"
            )


def environment(device: torch.device) -> dict[str, str]:
    """What the numbers are measured on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "driver": driver() if cuda else "",
        "backend": "cuda" if cuda else "tape",
        "torch": torch.__version__,
        "thunder": thunder.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def driver() -> str:
    """The version of NVIDIA's driver on Linux, such as 580.159.04, or "" where it cannot be read."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
