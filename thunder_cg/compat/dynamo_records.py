"""What Dynamo says of what it compiles, and of what it does not, as records. Dynamo takes long to import; not so this.

A function that Dynamo compiles is "f (train.py:3)"; what comes after a graph break is "f (from train.py:7 on)".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from traceback import FrameSummary
from typing import NamedTuple

BEFORE_BREAK = "a value from before the graph break"  # which has no name in the user's code
_COMPARED = re.compile(r" [=!<>]=? |\. expected ")
_SIZED = re.compile(r"(?:tensor ')?([^']+?)(?:' size mismatch|\.size\(\))")
_SIZE = re.compile(r"(?: size mismatch at index |\.size\(\)\[)(\d+)(?:\. expected |\] != )(\d+)(?:, actual (\d+))?")
_NUMBER = re.compile(r"(\w+(?:\.\w+)*) [=!<>]=? (-?[\d.]+)$")
_UNSET = re.compile(r"(\w+(?:\.\w+)*) is (?:not )?None$")
_OWN_LIST = re.compile(r"(?:not |len\()(\w+(?:\.\w+)+)")


class DynamoBreak(NamedTuple):
    """Why Dynamo could not go on, in its words, None if that is not known; and where, the innermost frame last.

    Attributes:
        function: that has the break, "" if that is not known, or if it is what the user has compiled.
    """

    reason: str | None
    stack: list[FrameSummary]
    function: str = ""


def is_after_break(function: str) -> bool:
    """Whether it is what comes after a graph break."""
    return function.endswith(" on)")


class DynamoGuard(NamedTuple):
    """A condition in Dynamo's words, taken apart. None where it is about something else."""

    value: str  # what it is about, without what Dynamo expected: "len(sizes)" of "len(sizes) == 1"
    is_before_break: bool  # whether that is `BEFORE_BREAK`
    sized: tuple[str, ...]  # names of tensors that it is about the sizes of
    size: tuple[int, tuple[int, ...]] | None  # the dimension, and the sizes that it names
    number: tuple[str, str] | None  # the name of a Python number, and its value
    unset: str | None  # the name of what may be None
    own_list: str | None  # the name of a list or dict of an object

    @classmethod
    def of(cls, condition: str) -> DynamoGuard:
        size, number = _SIZE.search(condition), _NUMBER.match(condition)
        unset, own_list = _UNSET.match(condition), _OWN_LIST.match(condition)
        return cls(
            value=_COMPARED.split(condition)[0],
            is_before_break=BEFORE_BREAK in condition,
            sized=(*_SIZED.findall(condition),),
            size=(int(size[1]), (int(size[2]), int(size[3] or 0))) if size is not None else None,
            number=(number[1], number[2]) if number is not None else None,
            unset=unset and unset[1],
            own_list=own_list and own_list[1],
        )


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
