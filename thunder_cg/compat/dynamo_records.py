"""What Dynamo says of what it compiles, and of what it does not, as records. Dynamo takes long to import; not so this.

A function that Dynamo compiles is "f (train.py:3)"; what comes after a graph break is "f (from train.py:7 on)".
"""

from __future__ import annotations

from dataclasses import dataclass
from traceback import FrameSummary
from typing import NamedTuple


class DynamoBreak(NamedTuple):
    """Why Dynamo could not go on, in its words, None if that is not known; and where, the innermost frame last.

    Attributes:
        function: that has the break, "" if that is not known, or if it is what the user has compiled.
    """

    reason: str | None
    stack: list[FrameSummary]
    function: str = ""


@dataclass(frozen=True, slots=True)
class RecompileLimit:
    """A function that Dynamo compiles no more: calls that fit none of its versions run in plain Python.

    Attributes:
        function: "f (train.py:3)".
        versions: how often it is compiled, for all functions and instances with the same code together.
        limit: the value of ``torch._dynamo.config.recompile_limit``.
        reason: the condition of a version that a call did not meet, so that Dynamo would have compiled again; "" if it
            is not known.
    """

    function: str
    versions: int
    limit: int
    reason: str


@dataclass(frozen=True, slots=True)
class Recompilation:
    """What Dynamo has compiled once more, as calls did not meet a condition of what it had compiled before.

    Attributes:
        function: "f (train.py:3)".
        condition: in Dynamo's words: "len(sizes) == 1".
        line: where that is read, as "train.py:7"; "" if it is not known.
        count: how often, with other values.
        is_mode: whether it is about a mode, such as whether gradients are enabled.
    """

    function: str
    condition: str
    line: str
    count: int
    is_mode: bool = False
