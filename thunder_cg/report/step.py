"""The report of a graphed step: how many calls replayed, and why the others ran in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from thunder_cg.report.units import count, size
from thunder_cg.step import GraphedStep


@dataclass(frozen=True, slots=True, repr=False)
class StepReport:
    """What became of a step of :func:`thunder_cg.graphed_step`. `print` it, or take `to_dict()`."""

    function: str
    calls: int
    replays: int  # of a graph that an earlier call captured
    captures: int  # calls that captured the step, and then ran the graph
    recordings: int  # graphs that are kept
    in_python: Mapping[str, int]  # calls that ran the function in Python, by their reasons
    pool_bytes: int  # of the memory that all graphs of the step share, gradients included

    @classmethod
    def of(cls, step: GraphedStep) -> StepReport:
        in_python = {reason: number for reason, number in step.in_python.most_common() if number}
        recordings = len(step.recordings)
        return cls(step.name, step.calls, step.replays, step.captures, recordings, in_python, step.pool_bytes())

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, strings and numbers, ready for `json.dumps`."""
        return asdict(self)

    def __str__(self) -> str:
        replayed = f"{self.replays:,} of {count(self.calls, 'call')} replayed the whole step as one graph"
        lines = [f"Step {self.function}: {replayed}; {count(self.captures, 'capture')}"]
        if self.in_python:
            lines.append("In Python, with the graphs of the compiled modules in it:")
            lines += [f"  {number:,} x {reason}" for reason, number in self.in_python.items()]
        if self.recordings:
            lines.append(f"Kept: {count(self.recordings, 'graph')} in {size(self.pool_bytes)}, gradients included")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
