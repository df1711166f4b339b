"""The result file of the operator sweep: what was measured on one machine, by case and by symbol."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thunder_cg.tools.operators.measure import OperatorRecord
from thunder_cg.tools.results import MeasuredResults

REASONS = 4  # that are kept of a case for samples that Thunder does not compile

NOTE = (
    "Of each symbol: how often it was replayed in a graph with results that equal those without, bit for bit "
    "('nondeterministic': to a tolerance, as they vary without a graph too), in the forward and in the backward; "
    "'forced': what came of capturing it although the rules deny that, by sample; 'alone': what came of capturing "
    "what PyTorch runs, where Thunder does not compile it. Written by python -m thunder_cg.tools.operators."
)


@dataclass(slots=True)
class OperatorResults(MeasuredResults):
    """All that was measured on one machine.

    Attributes:
        cases: by name, the counts of its :class:`OperatorRecord` s.
        symbols: by symbol, how often each outcome was seen; see :class:`OperatorRecord`.
        notes: by symbol and outcome other than "pass": the first sample, and the error.
    """

    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    symbols: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, record: OperatorRecord) -> None:
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
            self.symbols[symbol] = dict(Counter(self.symbols.get(symbol)) + counts)
        for key, text in record.notes.items():
            self.notes.setdefault(key, text)

    def to_dict(self) -> dict[str, Any]:
        cases = {name: {k: v for k, v in case.items() if v} for name, case in self.cases.items()}
        tables = {"cases": cases, "symbols": self.symbols, "notes": self.notes}
        return {"environment": self.environment, "note": NOTE, **tables}

    def to_text(self) -> str:
        """JSON with one line for each case and symbol."""
        parts = []
        for name, value in self.to_dict().items():
            if name in ("environment", "note"):
                parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
            else:
                rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(value.items())]
                parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> OperatorResults:
        return cls(*(content[name] for name in ("environment", "cases", "symbols", "notes")))
