"""Finds all tensors, functions with some code, and what holds an object, as Python's garbage collector knows them.

Note [Frozen objects]
    `gc.freeze` hides what there is from the collector, and from those who ask it. To see frozen objects, one has to
    unfreeze all, and to freeze them again with all that has come since, whose cycles are never freed then. So garbage
    is collected before, and tensors and functions are looked for there only if something has been frozen since that was
    done last: then a marker, made after that, is hidden, too. What holds an object is looked for there if nothing else
    is found to hold it.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, compress
from operator import attrgetter
from typing import Any

from torch import Tensor

from thunder_cg.compat.objects import alive, objects_of, referrers_of, with_subclasses
from thunder_cg.compat.tensors import has_memory
from thunder_cg.step.lookups import own
from thunder_cg.step.packages import is_constant

_MAX_HOLDERS = 5  # of one another, that are looked through for a name


class _Marker(list[object]):
    """Its one item is what finds it among all that refers to something."""


class _Frozen:
    def __init__(self) -> None:
        self.marker: _Marker | None = None
        self.objects: dict[type, list[weakref.ref[Any]]] = {}  # tensors and functions, by type


_frozen = _Frozen()


def known_tensors() -> list[Tensor]:
    """Those that have memory."""
    kinds = with_subclasses(Tensor)
    found = objects_of({*kinds, _Marker})
    return _each_once(tensor for tensor in _with_frozen(found, kinds) if has_memory(tensor))


def known_functions(codes: Collection[types.CodeType]) -> list[types.FunctionType]:
    """Those with one of the codes, none of which a package has that is constant: see Note [Packages] in packages.py."""
    found = referrers_of({types.FunctionType, _Marker}, [*(_frozen.marker or ()), *codes])
    functions = _with_frozen(found, {types.FunctionType})
    wanted = {*map(id, codes)}  # to hash a code is slow
    return _each_once(compress(functions, map(wanted.__contains__, map(id, map(attrgetter("__code__"), functions)))))


def holder_of(value: object) -> str | None:
    """What holds an object, by a name: a global, a variable of a closure or an attribute, maybe through containers."""
    if (found := _holder_of(value)) is None and gc.get_freeze_count():
        with _unfrozen():
            found = _holder_of(value)
    return found


def _holder_of(value: object) -> str | None:
    paths: dict[int, tuple[Any, str]] = {id(value): (value, "")}  # what holds it, and what leads from there to it
    seen = {*paths}
    for _ in range(_MAX_HOLDERS):
        holders = [each for each in gc.get_referrers(*(each for each, _ in paths.values())) if id(each) not in seen]
        seen.update(map(id, holders))
        above: dict[int, tuple[Any, str]] = {}
        for holder in holders:
            for held, path in paths.values():
                name, is_end = _name_in(holder, held)
                if is_end:
                    return f"{name}{path}"
                if name is not None:
                    above[id(holder)] = holder, f"{name}{path}"
        paths = above
    return None


def _name_in(holder: Any, held: Any) -> tuple[str | None, bool]:
    """How a holder names what it holds, None if it does not hold it itself; whether nothing above has to be known."""
    if isinstance(holder, types.CellType):
        users = [f for t in gc.get_referrers(holder) if type(t) is tuple for f in gc.get_referrers(t)]
        functions = [each for each in users if isinstance(each, types.FunctionType)]
        cells = ((f, *pair) for f in functions for pair in zip(f.__code__.co_freevars, f.__closure__ or ()))
        return next(
            ((f"the variable {n} of {f.__qualname__}", True) for f, n, cell in cells if cell is holder), (None, False)
        )
    if isinstance(holder, (list, tuple, deque)):
        return next((f"[{i}]" for i, each in enumerate([*holder]) if each is held), None), False
    names = holder if isinstance(holder, dict) else own(holder, "__dict__")
    key = [key for key, each in [*names.items()] if each is held] if isinstance(names, dict) else []
    if not key or names is not holder:
        return (f"the attribute {key[0]} of a {type(holder).__name__}" if key else None), bool(key)
    if own(sys.modules.get(str(names.get("__name__"))), "__dict__") is names:
        return f"the global {key[0]} of {names['__name__']}", True
    owner = next((each for each in gc.get_referrers(names) if own(each, "__dict__") is names), None)
    if owner is not None:
        return f"the attribute {key[0]} of a {type(owner).__name__}", True
    return f"[{key[0]!r}]", False


def _with_frozen(found: list[Any], kinds: Collection[type]) -> list[Any]:
    """What was found and is of these types, and what is frozen of them; some of it twice."""
    if not any(each is _frozen.marker for each in found):
        _look_into_frozen()
    references = chain.from_iterable(_frozen.objects.get(kind, ()) for kind in kinds)
    return [*(each for each in found if type(each) is not _Marker), *alive(references)]


def _each_once(objects: Iterable[Any]) -> list[Any]:
    return [*{id(each): each for each in objects}.values()]


@contextmanager
def _unfrozen() -> Iterator[None]:
    """See Note [Frozen objects]."""
    gc.collect()
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()


def _look_into_frozen() -> None:
    """See Note [Frozen objects]."""
    _frozen.objects = {}
    if gc.get_freeze_count():
        with _unfrozen():
            objects = objects_of({*with_subclasses(Tensor), types.FunctionType})
        for each in objects:
            if type(each) is not types.FunctionType or not is_constant(each.__code__.co_filename):
                _frozen.objects.setdefault(type(each), []).append(weakref.ref(each))
    _frozen.marker = _Marker([object()])
