"""What :mod:`thunder_cg.verify` tells the run time of a replay that was compared with an eager run of the same ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_cg.analysis.ops import Op
from thunder_cg.runtime.inputs import CopiedInput

# Makes buffers for a region's inputs: those that are copied in, and a buffer, or None, for each argument.
MakeBuffers = Callable[[], tuple[Sequence[CopiedInput], list[Any]]]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A graph that does not do what its ops do."""

    op: Op | None  # the first one whose value differs, if it is known
    difference: str
    where: str = ""  # the op's line in the user's source

    @property
    def problem(self) -> str:
        first = f"; the first value that differs is made by {self.op.name} {self.where}" if self.op else ""
        return f"its graph disagrees with its ops: {self.difference}{first}"

    @property
    def fix(self) -> str:
        """What keeps the rest of the region captured."""
        if self.op is None:
            return "find the operator to leave eager with deny=[...]"
        return f"leave the operator eager with deny=[{deny_name(self.op)!r}]"


def deny_name(op: Op) -> str:
    """The name by which ``deny=`` takes an op."""
    return op.id if op.id and op.executor else op.name


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a replay that was to be compared."""

    results: Sequence[Any] | None  # what the call gets; None: the region's ops have to run, and may raise
    disagreement: Disagreement | None = None  # for which the region is quarantined
    remark: str | None = None  # why a difference was tolerated, or why nothing could be compared
    compared: bool = True
