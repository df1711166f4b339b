"""The data file: what was measured on which machine, by case and by symbol."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thunder_cg.bench.results import environment
from thunder_cg.sweep.measure import Counts, Record

NOTE = (
    "Of each symbol: how often it was replayed in a graph with results that equal those without, bit for bit "
    "('nondeterministic': to a tolerance, as they vary without a graph too), in the forward and in the backward; and "
    "'forced': what came of capturing it although the rules deny that, by sample. Written by "
    "python -m thunder_cg rules; see thunder_cg/sweep."
)


@dataclass(slots=True)
class Results:
    """Everything measured on one machine.

    Attributes:
        cases: by name: how many samples there are, were tried, and were compiled by Thunder; why the others were not;
            crashes.
        symbols: by symbol: outcomes ("forward pass", "backward wrong", ...), and those of force ("forced fail", ...).
        notes: by symbol and outcome, of what did not pass: the first sample, and the error.
    """

    environment: dict[str, str]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    symbols: dict[str, Counts] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        case = self.cases.setdefault(record.task.case, {"samples": 0, "tried": 0, "traced": 0})
        case["samples"] = max(case["samples"], record.total)
        name = "backward" if record.task.grad else "forward"
        if record.task.grad:
            case["with_backward"] = case.get("with_backward", 0) + record.traced
        else:
            case["tried"] += record.tried
            case["traced"] += record.traced
        for reason, count in record.untraced.items():
            why = case.setdefault(f"untraced_{name}", {})
            if reason in why or len(why) < 4:
                why[reason] = why.get(reason, 0) + count
        if record.stale and not record.task.grad:
            case["stale"] = case.get("stale", 0) + record.stale
        if record.crash:
            case.setdefault("crashes", []).append(f"{record.task.name}: {record.crash}")
        _sum(self.symbols, record.symbols)
        _sum(self.symbols, {s: {f"forced {k}": v for k, v in c.items()} for s, c in record.forced.items()})
        for what, text in record.notes.items():
            self.notes.setdefault(what, text)

    def to_text(self) -> str:
        """One line for each case and symbol."""
        parts = [f'"environment": {json.dumps(self.environment)}', f'"note": {json.dumps(NOTE)}']
        for name in ("cases", "symbols", "notes"):
            rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(getattr(self, name).items())]
            parts.append(f'"{name}": {{\n' + ",\n".join(rows) + "\n}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `to_text` wrote. ValueError if it is something else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(*(content[name] for name in ("environment", "cases", "symbols", "notes")))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} does not hold results of this sweep ({error!r}); name another file") from None


def _sum(table: dict[str, Counts], more: Mapping[str, Counts]) -> None:
    for symbol, counts in more.items():
        mine = table.setdefault(symbol, {})
        for outcome, count in counts.items():
            mine[outcome] = mine.get(outcome, 0) + count


class Journal:
    """Records as they come, a line each, so that a sweep that is stopped goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def records(self) -> Iterator[Record]:
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    yield Record.from_dict(json.loads(line))
                except (ValueError, TypeError):  # the line that was being written when the sweep was stopped
                    continue

    def add(self, record: Record) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record.to_dict()) + "\n")


__all__ = ["Journal", "Results", "environment", "summed"]


def summed(records: Iterable[Record], results: Results) -> Results:
    for record in records:
        results.add(record)
    return results
