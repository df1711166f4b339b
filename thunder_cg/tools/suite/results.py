"""What was found, as JSON, and how it is added to what an earlier run found on the same machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from thunder_cg.tools.bench import results as bench
from thunder_cg.tools.suite.row import MODES, Outside, Row

NOTE = (
    "Times in microseconds: medians of synchronised steps, uncaptured Thunder and captured in turns in one process; 0 "
    "where not measured. Row in thunder_cg/zoo/row.py says the rest."
)
PACKAGES = ("transformers", "torchvision", "timm")


@dataclass(slots=True)
class Results:
    """All rows of one machine."""

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row, order: Sequence[str]) -> None:
        """Takes a row, in place of an earlier one of the same model and mode; `order` is that of the models."""
        others = [other for other in self.rows if (other.model, other.mode) != (row.model, row.mode)]
        place = {name: index for index, name in enumerate(order)}
        self.rows = sorted([*others, row], key=lambda r: (place.get(r.model, len(place)), r.model, MODES.index(r.mode)))

    def write(self, path: Path) -> None:
        content = {"environment": self.environment, "note": NOTE, "rows": [asdict(row) for row in self.rows]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `write` wrote. ValueError if it is something else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(content["environment"], [read_row(row) for row in content["rows"]])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold results of the zoo ({error!r}); name another file") from None


def read_row(content: Mapping[str, object]) -> Row:
    """A row as `dataclasses.asdict` gave it. TypeError if it is something else."""
    row = Row(**content)  # type: ignore[arg-type]
    row.outside = [Outside(**part) for part in row.outside]  # type: ignore[arg-type]
    return row


def results_for(path: Path | None, device: torch.device) -> Results:
    """Those in `path`, to be added to, if it is there.

    Raises:
        ValueError: they are from another machine or other versions.
    """
    here = environment(device)
    if path is None or not path.exists():
        return Results(here)
    found = Results.read(path)
    bench.check_environment(path, found.environment, here)
    return Results(here, found.rows)


def environment(device: torch.device) -> dict[str, str]:
    """What the rows are measured on; packages that are not installed are left out."""
    found = bench.environment(device)
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
