"""Finds all tensors, and all functions with some code, among the objects that Python's garbage collector knows.

Note [Frozen objects]
    `gc.freeze` hides what there is from the collector, and from those who ask it. To see frozen objects, one has to
    unfreeze all, and to freeze them again with all that has come since, whose cycles are never freed then. So this is
    done only if something has been frozen since it was done last: then a marker, made after that, is hidden, too.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Collection
from itertools import compress
from typing import Any

from torch import Tensor

from thunder_cg.compat.torch import has_memory


class _Marker(list[object]):
    """Its one item is what finds it among all that refers to something."""


class _Frozen:
    def __init__(self) -> None:
        self.marker: _Marker | None = None
        self.objects: dict[type, list[weakref.ref[Any]]] = {}  # tensors and functions, by type


_frozen = _Frozen()


def known_tensors() -> list[Tensor]:
    """Those that have memory."""
    kinds = _kinds_of_tensors()
    found = _of({*kinds, _Marker}, gc.get_objects())
    return [tensor for tensor in _with_frozen(found, kinds) if has_memory(tensor)]


def known_functions(codes: Collection[types.CodeType]) -> list[types.FunctionType]:
    """Those with one of the codes."""
    found = gc.get_referrers(*(_frozen.marker or ()), *codes)
    return [function for function in _with_frozen(found, {types.FunctionType}) if function.__code__ in codes]


def _with_frozen(found: list[Any], kinds: Collection[type]) -> list[Any]:
    """What was found and is of these types, and what is frozen of them."""
    if not any(each is _frozen.marker for each in found):
        _look_into_frozen()
    frozen = (reference() for kind in kinds for reference in _frozen.objects.get(kind, ()))
    return [*{id(each): each for each in (*found, *frozen) if type(each) in kinds}.values()]


def _look_into_frozen() -> None:
    """See Note [Frozen objects]."""
    _frozen.objects = {}
    if gc.get_freeze_count():
        gc.unfreeze()
        objects = gc.get_objects()
        gc.freeze()
        for each in _of({*_kinds_of_tensors(), types.FunctionType}, objects):
            _frozen.objects.setdefault(type(each), []).append(weakref.ref(each))
    _frozen.marker = _Marker([object()])


def _of(kinds: Collection[type], objects: list[Any]) -> list[Any]:
    return [*compress(objects, map(kinds.__contains__, map(type, objects)))]  # a million, maybe, so no loop in Python


def _kinds_of_tensors() -> set[type]:
    kinds: list[type] = [Tensor]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    return {*kinds}
