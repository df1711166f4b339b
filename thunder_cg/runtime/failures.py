"""What an error in a region says: which op raised it, in one sentence, and whether memory ran out."""

from __future__ import annotations

import linecache
import re
from collections.abc import Collection, Sequence
from traceback import walk_tb
from types import CodeType

import torch

from thunder_cg.analysis.ops import Op
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime.early_outputs import EarlyCopier

_MOST_OPERATORS = 8  # in a note


def failing_op(error: BaseException, ops: Sequence[Op], functions: Collection[CodeType]) -> Op | None:
    """The op that raised the error, if it was one of these, run by one of the functions that have a line for each."""
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    if any(code is EarlyCopier.__call__.__code__ for code, _ in frames):  # no op, but the copy of a result
        return None
    for code, number in frames:
        if code in functions:
            line = linecache.getline(code.co_filename, number)
            assigned = set(re.findall(r"\w+", line.partition("=")[0]))
            return next((op for op in ops if assigned.intersection(op.outputs)), None)
    return None


def note(error: Exception, said: str) -> None:
    """Adds a sentence to an error that goes to the user."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(said)


def note_replay(error: Exception, graph: str, operators: str, fix: str) -> None:
    """Notes on an error that the replay of a graph raised all that is known of it.

    Args:
        operators: those in the graph.
        fix: what runs the same operators without graphs.
    """
    known = f"One launch runs {operators}, so it is not known which operator failed, or whether it is in this graph"
    how = f"To find out, start a new process and {fix}, with the same inputs"
    late = "on CUDA set CUDA_LAUNCH_BLOCKING=1 in its environment, since errors of kernels show late"
    note(error, f"A replay of the graph of {graph} raised this. {known}. {how}; {late}.")


def listed(operators: Sequence[str]) -> str:
    """Operators with their lines, the first of many."""
    more = len(operators) - _MOST_OPERATORS
    return ", ".join(operators[:_MOST_OPERATORS]) + (f", and {more:,} more" if more > 0 else "")


def sentence(error: BaseException) -> str:
    """The error's type and the first sentence of its message; the rest may differ from time to time."""
    if isinstance(error, ReplayRefused):
        error = error.__cause__ or error
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {text or 'no message'}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or what caused it, says so. Drivers have no class for it."""
    if error is None:
        return False
    said = "out of memory" in str(error).lower().replace("_", " ")
    return said or isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__cause__)
