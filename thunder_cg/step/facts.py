"""Facts that can be compared: what a step depends on, each with a name, as values that do not change by themselves."""

from __future__ import annotations

import enum
import re
import struct
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_cg.runtime.tensors import has_history
from thunder_cg.step.lookups import MISSING

REQUIRES_GRAD, WITH_HISTORY = " that requires grad", " with a history"  # how what is said of a tensor ends
ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, range)
_EXACT = {*ATOMS} - {float, complex, range}  # equal if they are the same


def numbered(label: str, count: int) -> str:
    """A name for the thing of this name that comes after ``count - 1`` others."""
    return label if count == 1 else f"{label} (the {count}. of this name)"


class Facts(dict[str, Any]):
    """Facts by their names. A name that is taken by another fact gets a number: methods of two objects say ``self``."""

    def __setitem__(self, label: str, fact: Any) -> None:
        name, count = label, 1
        while name in self and self[name] != fact:
            count += 1
            name = numbered(label, count)
        super().__setitem__(name, fact)

    @classmethod
    def of(cls, *several: Mapping[str, Any]) -> Facts:
        """All of these."""
        facts = cls()
        for each in several:
            for label, fact in each.items():
                facts[label] = fact
        return facts


class Same:
    """A fact that is an object: equal to nothing but itself, and not to itself if it required grad and does no more.

    Of a key, only which object it is counts.
    """

    __slots__ = ("requires_grad", "value")

    def __init__(self, value: Any, *, is_key: bool = False) -> None:
        self.value = value
        self.requires_grad = not is_key and issubclass(type(value), Tensor) and value.requires_grad

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or other.value is not self.value:
            return False
        return bool(other.requires_grad == self.requires_grad)

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        value = self.value
        if value is MISSING:
            return "nothing"
        if isinstance(value, Tensor):
            end = WITH_HISTORY if has_history(value) else REQUIRES_GRAD if self.requires_grad else ""
            if value.is_nested:
                return f"a nested tensor{end}"
            return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}{end}"
        return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


class Atom(NamedTuple):
    """A fact that is a plain value: equal for values of one type that are the same, as 0.0 and -0.0 are not."""

    kind: type
    value: Any  # as text if others are equal to it, as -0.0 is to 0.0, or if its class may say what is

    def __repr__(self) -> str:
        is_text = type(self.value) is str is not self.kind
        return self.value.partition(" of ")[0] if is_text else repr(self.value)


class Content:
    """A fact that is what an object holds, which says nothing to a reader."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and bool(other.value == self.value)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return "something else"


_OTHER = Content(None)


class Hash(int):
    """A fact that is the hash of what an object holds, which says nothing to a reader."""


def fact_of(value: Any) -> Any:
    """A value without what it refers to: of a plain one its content."""
    if isinstance(value, types.MethodType):  # each lookup makes a new one
        return Atom(types.MethodType, (Same(value.__func__), Same(value.__self__)))
    if not isinstance(value, ATOMS):
        return Same(value)
    return Atom(kind := type(value), value if kind in _EXACT or isinstance(value, enum.Enum) else _text_of(value))


def _text_of(value: Any) -> str:
    """All of it, whatever its class says of itself."""
    kind: Any = next(kind for kind in ATOMS if isinstance(value, kind))
    text = kind.__repr__(value)
    is_number = isinstance(value, (float, complex)) and value != value  # NaNs have a sign, and other bits
    return f"{text} of {struct.pack('dd', value.real, value.imag).hex()}" if is_number else text


def is_equal(now: Any, then: Any) -> bool:
    return now is then or bool(fact_of(now) == fact_of(then))


class Difference(NamedTuple):
    """A fact that differs. In words it is "losses changed from 1 to 2"."""

    label: str
    before: Any  # `MISSING` where there was no such fact
    after: Any

    @property
    def shown(self) -> tuple[str, str]:
        """Both values in words; "" if there are not both, or if they say nothing to a reader."""
        if self.before is MISSING or self.after is MISSING or isinstance(self.before, (Content, Hash)):
            return "", ""
        return f"{self.before!r:.80}", f"{self.after!r:.80}"

    def __str__(self) -> str:
        if self.after is MISSING:
            return f"{self.label} was {self.before!r:.80} and is gone"
        if self.before is MISSING:
            return f"{self.label} is new: {self.after!r:.80}"
        before, after = self.shown
        return f"{self.label} changed from {before} to {after}" if after else f"{self.label} changed"


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference | None:
    """The first fact that differs; None if none does."""
    for label, value in before.items():
        if label not in after:
            return _gone(label, value, after)
        if after[label] != value:
            return Difference(label, value, after[label])
    new = next((label for label in after if label not in before), None)
    return None if new is None else Difference(new, MISSING, after[new])


def _gone(label: str, value: Any, after: Mapping[str, Any]) -> Difference:
    """A fact that there is no more. A container has none of its own, but those of what it holds."""
    name = re.sub(r"^(len|type)\((.*)\)$", r"\2", label)
    if not any(re.match(rf"{re.escape(name)}\W", subject(each)) for each in after):
        return Difference(label, value, MISSING)
    return Difference(label, value, _OTHER) if name == label else Difference(f"what {name} holds", _OTHER, _OTHER)


def subject(label: str) -> str:
    """What a fact is about: "len(losses)" begins with "losses"."""
    return re.sub(r"^(len\(|what |the order of |the bases of |the name of |type\()+", "", label)
