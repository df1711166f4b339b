"""Notices writes to what facts were collected from.

So facts are collected again only then: see Note [Cheap checks of a state] in state.py.

Note [Values that nobody reports]
    An array of NumPy, a tensor of its memory and a generator of random numbers change without a trace in any
    dictionary. So a replay compares what they hold. What an iterator or a queue holds cannot be told, and no replay
    would advance it: such a step is not captured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, NamedTuple

from thunder_cg.compat.guards import attribute_guard, attribute_writes_are_reported, dictionary_guard
from thunder_cg.step.facts import Facts, fact_of, is_equal
from thunder_cg.step.lookups import MISSING, own_attributes
from thunder_cg.step.places import plain_copy

_NAMES = attrgetter("__name__", "__qualname__", "__module__", "__doc__")  # of a function, which keeps them in C
_UNREPORTED = object()  # stands for a dictionary to which somebody may write unseen


class _LookedUp(NamedTuple):
    """An object and its class, and what it has as the attributes that count: `MISSING` if it has none.

    It may be a dictionary with its items.
    """

    value: Any
    kind: type
    attributes: Mapping[str, Any]

    def is_unchanged(self) -> bool:
        """Whether the attributes are equal to what they were."""
        now = self.value if type(self.value) is dict else own_attributes(self.value)
        pairs = ((now.get(name, MISSING), then) for name, then in self.attributes.items())
        return type(self.value) is self.kind and all(starmap(is_equal, pairs))


class Watch:
    """Is told what facts are collected from, and says afterwards whether anything of it was written to."""

    facts: Facts
    holders: set[int]  # the identities of containers and objects

    def __init__(self) -> None:
        self._names: dict[int, Any] = {}  # objects and dictionaries, by identity
        self._empty: list[Any] = []  # dictionaries and sets
        self._lists: list[tuple[Any, dict[int, Any], int]] = []  # and deques: what each has by position, and its length
        self._values: list[tuple[Callable[[], Any], Any]] = []  # see Note [Values that nobody reports]
        self._looked_up: list[_LookedUp] = []
        self._fields: list[tuple[Callable[[Any], tuple[Any, ...]], Any, tuple[Any, ...]]] = []
        self._functions: dict[int, FunctionType] = {}  # by identity

    def names(self, *owners: Any) -> None:
        """Objects and dictionaries: which names they have, and for what."""
        self._names.update(zip(map(id, owners), owners))

    def given_attributes(self, attributes: dict[str, Any]) -> None:
        """The dictionary of an object that is no module or optimizer. Most are empty, as those of parameters."""
        if attributes:
            self.names(attributes if attribute_writes_are_reported() else _UNREPORTED)
        else:
            self._empty.append(attributes)

    def attributes(self, value: Any, attributes: Mapping[str, Any]) -> None:
        """Only these of an object's attributes, or of a dictionary's items."""
        self._looked_up.append(_LookedUp(value, type(value), attributes))

    def container(self, value: Any, besides: Sequence[int] = ()) -> None:
        """What is in a list, a deque or a set, but for what a list has at some positions."""
        if type(value) is set and not value:
            self._empty.append(value)
        elif isinstance(value, set):
            self.value(lambda: [*map(fact_of, plain_copy(value))])
        elif isinstance(value, (list, deque)):
            self._lists.append((value, {i: each for i, each in enumerate(value) if i not in besides}, len(value)))

    def value(self, get: Callable[[], Any]) -> Any:
        """What a function returns, which is returned."""
        value = get()
        self._values.append((get, value))
        return value

    def fields(self, get: Callable[[Any], tuple[Any, ...]], value: Any) -> tuple[Any, ...]:
        """Which objects a function finds in a value, such as what it keeps in C. They are returned."""
        self._fields.append((get, value, found := get(value)))
        return found

    def function(self, function: FunctionType) -> tuple[Any, ...]:
        """The names of a function, which are returned."""
        self._functions[id(function)] = function
        return _NAMES(function)

    def begin(self, facts: Facts) -> Watch:
        """From now on. Returns itself, with the facts."""
        self.facts = facts
        self._are_called = [*map(_NAMES, self._functions.values())]
        self._are_names_as_before = dictionary_guard([*self._names.values()])
        self._have_same = attribute_guard([(each.value, each.attributes) for each in self._looked_up], MISSING)
        return self

    def is_untouched(self) -> bool:
        return (
            self._are_names_as_before()
            and (self._have_same() or all(each.is_unchanged() for each in self._looked_up))
            and not any(self._empty)
            and all(map(_is_unchanged, self._lists))
            and all(all(map(is_, get(value), then)) for get, value, then in self._fields)
            and all(get() == then for get, then in self._values)
            and [*map(_NAMES, self._functions.values())] == self._are_called
        )


def _is_unchanged(container: tuple[Any, dict[int, Any], int]) -> bool:
    now, then, length = container
    return len(now) == length and all(map(is_, map([*now].__getitem__, then), then.values()))
