"""All objects of some types, as Python's garbage collector and weak references know them, beside other threads.

Note [Tuples of other threads]
    All objects include tuples that another thread is just making, as `tuple` does of a generator. CPython (to 3.13)
    raises SystemError there if anybody else holds such a tuple when it is done, and so if that thread runs while a list
    of all objects is there. So the list is made, filtered and dropped in C, which other threads wait for: no bytecode
    runs in between, and nothing is collected. `id` is not used there, since it calls audit hooks, such as filelock's,
    and neither is the hash of a class, which may be a metaclass's function.

Note [Counts of references]
    Whether a user holds a gradient is found by how many hold it more than did when it was made. Who looks at all
    tensors holds those of other threads for a moment. If these counted just then, a holder would be missed later. So
    whoever looks at all tensors, or counts for later, has the lock `counting`. Other counts may be too high beside such
    a look, which is harmless: a call runs in Python, or gradients are moved.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress, starmap
from typing import Any, TypeVar

_T = TypeVar("_T")
_identity = object.__hash__  # another one for each object that is there
counting = threading.RLock()  # see Note [Counts of references]


def objects_of(kinds: Collection[type]) -> list[Any]:
    """All objects of exactly these types, but for those that `gc.freeze` has set apart."""
    return _those_of(kinds, gc.get_objects, ())


def referrers_of(kinds: Collection[type], objects: Sequence[Any]) -> list[Any]:
    """What refers to one of the objects, and is of exactly these types."""
    return _those_of(kinds, gc.get_referrers, objects)


def with_subclasses(kind: type) -> set[type]:
    """The class and all that were derived from it."""
    kinds = [kind]
    for each in kinds:  # which grows
        kinds += each.__subclasses__()
    return {*kinds}


def alive(references: Iterable[weakref.ref[_T]]) -> list[_T]:
    """What is still there. Of a `WeakValueDictionary`, give `valuerefs()`: another thread may put in something else."""
    return [each for ref in references if (each := ref()) is not None]


class _Uncollected:
    """How many are in `without_garbage_collection`, on all threads, and what the last of them restores."""

    lock = threading.RLock()  # a destructor may look at all objects just when one begins to
    users = 0
    thresholds = gc.get_threshold()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, Python collects no garbage by itself, and what is captured finds `gc` as enabled as it was."""
    with _Uncollected.lock:
        if not _Uncollected.users:
            _Uncollected.thresholds = gc.get_threshold()
            gc.set_threshold(0)
        _Uncollected.users += 1
    try:
        yield
    finally:
        with _Uncollected.lock:
            if _Uncollected.users == 1:
                gc.set_threshold(*_Uncollected.thresholds)
            _Uncollected.users -= 1


def _those_of(kinds: Collection[type], get: Callable[..., list[Any]], args: Sequence[Any]) -> list[Any]:
    """Those of the types that ``get(*args)`` has. See Note [Tuples of other threads]."""
    with without_garbage_collection():
        _, *found, _ = _steps({*map(_identity, kinds)}, get, args)
    return found


def _steps(kinds: set[int], get: Callable[..., list[Any]], args: Sequence[Any]) -> Iterator[Any]:
    """Makes the list, filters it and drops it, while it is iterated over.

    The list has these iterators, too, so each of them has to come to its end before they are dropped.
    """
    lists: list[list[Any]] = []
    objects, same = chain.from_iterable(lists), chain.from_iterable(lists)
    selected = compress(chain(objects, (None,)), map(kinds.__contains__, map(_identity, map(type, same))))
    return chain(map(lists.append, starmap(get, (args,))), selected, map(list.clear, (lists,)))


def modules_of_threads() -> set[str]:
    """Of each other thread of Python, the module of what it runs; "threading" if that is a builtin function."""
    found, frames = set(), sys._current_frames()
    del frames[threading.get_ident()]  # with this call's own frame, that would be a cycle, and keep what callers have
    for frame in frames.values():
        # The first call that is not of `threading` is that of the thread's target.
        modules = [each.f_globals.get("__name__", "") for each, _ in traceback.walk_stack(frame)]
        found.add(next((name for name in reversed(modules) if name != threading.__name__), threading.__name__))
    return found
