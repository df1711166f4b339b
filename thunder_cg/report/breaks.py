"""Graph breaks: where Dynamo could not go on, so that it ended a graph and began another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thunder_cg.analysis.rules import FIXED_SIZE, KEEP_ON_DEVICE
from thunder_cg.analysis.sources import SourceLine, called_from, users

_BRANCH = "choose with torch.where, or branch outside of the compiled function"
_ITEM = (
    f"{KEEP_ON_DEVICE}; torch._dynamo.config.capture_scalar_outputs spares the graph break at most: the host still "
    "reads the number, and what uses the number is in no CUDA graph"
)
_NO_HELP = ("Please report an issue", "It may be possible to write", "This graph break is fundamental")


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """One graph break. What comes before it and what comes after it can have no region in common.

    Attributes:
        function: the compiled function, and the number of the graph that ends there.
        line: where that is in the user's code, and from where it is called: "model.py:38, called from train.py:7".
        source: the text of that line.
        reason: in Dynamo's words.
        fix: what would change it, "" if Dynamo has no advice.
    """

    function: str
    line: str | None
    source: str | None
    reason: str
    fix: str


def graph_breaks(label: str, graph: Any) -> Iterator[GraphBreak]:
    """The graph break that ended one of Dynamo's graphs, if one did."""
    ended = getattr(graph.original_graph_module, "compile_subgraph_reason", None)
    if ended is None or not ended.graph_break:
        return
    frames = users([SourceLine(frame.filename, frame.lineno) for frame in ended.user_stack])
    reason, fix = _understood(ended.reason)
    yield GraphBreak(label, called_from(frames), frames[-1].text if frames else None, reason, fix)


def _understood(said: str) -> tuple[str, str]:
    """The reason and the fix in Dynamo's message, which has hints on lines of their own."""
    first, *rest = [line.strip() for line in said.strip().splitlines()] or [""]
    if any(each in first for each in ("jump", "Data-dependent branching", "Could not guard on data-dependent")):
        return "a branch on what a tensor holds", _BRANCH
    if ".item()" in first:
        return "Tensor.item() reads what a tensor holds into Python", _ITEM
    if any(each in first for each in ("tolist()", "Data dependent operator")):
        return first, _ITEM
    if first.startswith("Dynamic shape operator"):  # traced, it would be left to Inductor
        return first, FIXED_SIZE
    hints = [line.removeprefix("Hint: ") for line in rest if line.startswith("Hint: ")]
    return first, next((hint for hint in hints if not hint.startswith(_NO_HELP)), "")
