"""The hooks of verification: a replay is compared with an eager run of the same ops on the same inputs.

The run time knows this protocol only. :mod:`thunder_cg.verify` implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from thunder_cg.analysis.ops import Op
from thunder_cg.runtime.backend import Pool
from thunder_cg.runtime.inputs import CopiedInput

if TYPE_CHECKING:
    from thunder_cg.runtime.recording import RegionGraph
    from thunder_cg.runtime.region import RuntimeRegion

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


class Verifier(Protocol):
    """Compares replays with eager runs, for one program."""

    def record(
        self, region: RuntimeRegion, pool: Pool, args: Sequence[Any], place: MakeBuffers, in_pool: Set[int]
    ) -> Any:
        """While the region is recorded: what a comparison needs later, to be kept as the graph's ``check``.

        ``in_pool`` are the positions of the arguments in the arena, which a replay may overwrite.
        """

    def replay(self, region: RuntimeRegion, graph: RegionGraph, args: Sequence[Any]) -> Outcome:
        """Called instead of a replay. Results, written inputs and generators are as one eager run leaves them."""

    def hash_values(self, device: torch.device, *values: Any) -> torch.Tensor:
        """Hashes of the values that one op made, on the device. The region's ``hash_function`` calls it."""
