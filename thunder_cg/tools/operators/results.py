"""The data file: what was measured on which machine, by case and by symbol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thunder_cg.tools.bench.results import check_environment, environment
from thunder_cg.tools.operators.measure import Counts, Record

REASONS = 4  # for which samples are not compiled, that are kept of a case

NOTE = (
    "Of each symbol: how often it was replayed in a graph with results that equal those without, bit for bit "
    "('nondeterministic': to a tolerance, as they vary without a graph too), in the forward and in the backward; "
    "'forced': what came of capturing it although the rules deny that, by sample; 'alone': what came of capturing "
    "what PyTorch runs, where Thunder does not compile it. Written by python -m thunder_cg rules."
)


@dataclass(slots=True)
class Results:
    """Everything measured on one machine.

    Attributes:
        cases: by name, what a Record says of them.
        symbols: by symbol, how often it came to which end; see Record.
        notes: by symbol and outcome, of what did not pass: the first sample, and the error.
    """

    environment: dict[str, str]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    symbols: dict[str, Counts] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        case = self.cases.setdefault(record.task.case, {"samples": 0})
        case["samples"] = max(case["samples"], record.total)
        for name in ("tried", "traced", "differentiated", "stale"):
            case[name] = case.get(name, 0) + getattr(record, name)
        for name in ("untraced", "undifferentiated"):
            why = case.setdefault(name, {})
            for reason, count in getattr(record, name).items():
                if reason in why or len(why) < REASONS:
                    why[reason] = why.get(reason, 0) + count
        case.setdefault("crashes", []).extend([f"{record.task.name}: {record.crash}"] if record.crash else [])
        for symbol, counts in record.symbols.items():
            mine = self.symbols.setdefault(symbol, {})
            for outcome, count in counts.items():
                mine[outcome] = mine.get(outcome, 0) + count
        for what, text in record.notes.items():
            self.notes.setdefault(what, text)

    def to_text(self) -> str:
        """One line for each case and symbol."""
        parts = [f'"environment": {json.dumps(self.environment)}', f'"note": {json.dumps(NOTE)}']
        cases = {name: {k: v for k, v in case.items() if v} for name, case in self.cases.items()}
        tables: dict[str, dict[str, Any]] = {"cases": cases, "symbols": self.symbols, "notes": self.notes}
        for name, table in tables.items():
            rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items())]
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


class Journal:
    """Records as they come, a line each, so that a sweep that is stopped goes on where it was."""

    def __init__(self, path: Path | None, here: dict[str, str]) -> None:
        self._path = path
        self._here = here

    def records(self) -> Iterator[Record]:
        """What is there already.

        Raises:
            ValueError: it is from another machine or other versions.
        """
        if self._path is None or not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                content = json.loads(line)
            except ValueError:  # the line that was being written when the sweep was stopped
                continue
            if "environment" in content:
                check_environment(self._path, content["environment"], self._here)
            else:
                yield Record.from_dict(content)

    def add(self, record: Record) -> None:
        if self._path is None:
            return
        lines = [] if self._path.exists() else [{"environment": self._here}]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in [*lines, record.to_dict()])


__all__ = ["Journal", "Results", "environment"]
