"""Watches which attributes of the user's objects a step looks up or writes.

Note [Attributes that nobody looks up]
    Python runs only while a step is noted or captured. What it does not look up there is not baked into the graph. So
    of an object that is passed on, only the attributes that have been seen looked up or written are facts: a trainer
    may count its steps, and keep a history, a loader and a logger. An attribute that was looked up and not there is a
    fact, too. A capture that looks up more than is compared is given up, and the step is looked at anew.

Note [How lookups are seen]
    The class of an object gets a ``__getattribute__`` and a ``__setattr__`` for the time of the run, which all lookups
    go through, also those of slots, of C code and on other threads. Whoever gets the ``__dict__``, or copies or pickles
    the object, may have looked up everything. What the code only adds to, in ``self.steps += 1``, is not looked up, if
    the object is a part of the state. Names are kept by class. All attributes of an object are facts if its
    class cannot be changed, looks attributes up by itself, or is used in what Thunder or Dynamo compile: they look
    attributes up where nobody sees it, and Dynamo does not compile what such a class does.
"""

from __future__ import annotations

import dis
import inspect
import struct
import threading
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import dropwhile
from typing import Any

from torch import nn

from thunder_cg.compat.guards import dictionary_of
from thunder_cg.compat.torch_compile import before_dynamo_compiles
from thunder_cg.step.bytecode import growing, instructions
from thunder_cg.step.lookups import MISSING, own_attributes
from thunder_cg.step.places import Place
from thunder_cg.step.reads import GROWING

_CHANGEABLE, _IMMUTABLE = 1 << 9, 1 << 8  # flags of a type in CPython: made by a class statement, and frozen
_POINTER = struct.calcsize("P")  # bytes
EVERYTHING = {"__dict__", "__reduce__", "__reduce_ex__", "__getstate__"}
# Functions that get the dictionary of an object for the one attribute that they were asked for.
_FOR_ONE = {
    cached_property.__get__.__code__,
    *(
        vars(nn.Module)[name].__code__
        for name in ("__getattr__", "__setattr__", "__delattr__", "register_buffer", "register_parameter")
    ),
}
_ORIGINAL = "original of thunder_cg"
Names = Mapping[type, Sequence[str]]
_HOOKED = ("__getattribute__", "__setattr__", "__delattr__")
_ours = threading.local()  # has a name while this package itself looks at objects on the thread


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, what this thread looks up or writes is not the step's."""
    _ours.looks = True
    try:
        yield
    finally:
        del _ours.looks


class Attributes:
    """The attributes that a step has been seen to look up or to write, by class.

    Attributes:
        seen: how many there are. Whatever makes more of the state facts raises it.
        newest: the last of them, in words.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.newest = ""
        self.grown: dict[tuple[int, str], Any] = {}  # objects, by them and names: what the last run has only added to
        self.grows: dict[tuple[int, str], tuple[Any, str]] = {}  # in the same way: what runs have only added to
        self._names: dict[type, dict[str, None]] = {}
        self._whole: set[type] = set()
        self._is_whole = False

    def by_class(self) -> Names:
        """Those that there are by now. Of objects of other classes it may be all."""
        return {kind: tuple(names) for kind, names in self._names.items()}

    def observe(self, kinds: Iterable[type], whole: Iterable[type]) -> bool:
        """Watches objects of these classes from the next run on, except for those of which everything is compared.

        Returns whether there are more of them than before.
        """
        for kind in whole:
            self._add_all(kind)
        before = len(self._names)
        for kind in kinds:
            if not self._is_whole and kind not in self._whole and can_be_hooked(kind):
                self._names.setdefault(kind, {})
        return len(self._names) > before

    def add_all(self) -> None:
        """From now on all attributes of all objects are facts."""
        self.seen += bool(self._names)
        self.newest = "any attribute of any object"
        self._names, self._is_whole = {}, True

    def _give_up(self, hooks: ExitStack) -> None:
        self.add_all()
        hooks.close()

    def _add_all(self, kind: type) -> None:
        if self._names.pop(kind, None) is not None:
            self._note_new(f"any attribute of a {kind.__name__}")
        self._whole.add(kind)

    def _note(self, value: Any, name: str) -> None:
        kind = type(value)
        if (names := self._names.get(kind)) is None or name in names:
            return
        caller = calling_frame()
        if name in EVERYTHING:
            if caller is None or caller.f_code not in _FOR_ONE:
                self._add_all(kind)
        elif caller is not None and is_at(caller, growing) and type(own_attributes(value).get(name)) in (*GROWING, int):
            self.grown[id(value), name] = value
        else:
            self.add(kind, name)

    def add(self, kind: type, name: str) -> None:
        """An attribute counts as looked up."""
        if name not in self._names.get(kind, (name,)):
            self._names[kind][name] = None
            self._note_new(f"the attribute {name} of a {kind.__name__}")

    def add_grown(self, known: Container[Any], objects: Iterable[Any]) -> None:
        """Notes what the last run has only added to, but for what is known to grow, by place.

        Of other objects than these it counts as looked up.
        """
        objects = {*map(id, objects)}
        for (i, name), value in self.grown.items():
            if Place.of(value, name).key in known:
                continue
            if i in objects and (i, name) not in self.grows:
                self.grows[i, name] = value, name
                self._note_new(f"the attribute {name} of a {type(value).__name__}")
            else:
                self.add(type(value), name)

    def _note_new(self, newest: str) -> None:
        self.seen, self.newest = self.seen + 1, newest

    @contextmanager
    def watched(self, values: Iterable[Any] = ()) -> Iterator[None]:
        """Watches what is looked up and written inside, on all threads.

        Args:
            values: objects of which an attribute counts as written if it is another one afterwards, however it came.
        """
        self.grown.clear()
        before = [(value, own_attributes(value)) for value in values if type(value) in self._names]
        with ExitStack() as hooks, before_dynamo_compiles(partial(self._give_up, hooks)):
            for kind in [*self._names]:
                hooks.enter_context(hooked(kind, self._note))
            yield
        for value, then in before:
            now = own_attributes(value)
            for name in now.keys() | then.keys():
                if now.get(name, MISSING) is not then.get(name, MISSING) and (id(value), name) not in self.grown:
                    self.add(type(value), name)


def hides_state(kind: type) -> type | None:
    """The class, or the base of it, whose objects have something in C that is neither an attribute nor a slot."""
    while (base := kind.__base__) is not None:
        own = dictionary_of(kind)
        members = sum(isinstance(each, types.MemberDescriptorType) for each in own.values())
        named = members + ("__dict__" in own) + ("__weakref__" in own)
        if kind.__basicsize__ - base.__basicsize__ > named * _POINTER:
            return kind
        kind = base
    return None


def only_sets(value: Any, name: str) -> bool:
    """Whether the class of an object does nothing but set an attribute that somebody sets."""
    member = inspect.getattr_static(type(value), name, None)
    is_descriptor = hasattr(type(member), "__set__") and not inspect.ismemberdescriptor(member)
    plain = (each.__setattr__ for each in (object, type, types.ModuleType, types.SimpleNamespace, nn.Module))
    return not is_descriptor and next(dropwhile(_passes_on, _defined(type(value), "__setattr__"))) in plain


def _passes_on(method: Any) -> bool:
    """Whether a ``__setattr__`` looks at no value, but calls that of the next class with it, as ``super()`` does."""
    if not isinstance(method, types.FunctionType) or method.__code__.co_argcount != 3:
        return False
    _, name, value = method.__code__.co_varnames[:3]
    each_of = [*instructions(method.__code__)]
    at = [i for i, each in enumerate(each_of) if each.value == value]
    before = [each.value for each in each_of[at[0] - 2 : at[0]]] if len(at) == 1 else []
    return before == ["__setattr__", name] and each_of[at[0] + 1].name.startswith("CALL")


def _defined(kind: type, name: str) -> Iterator[Any]:
    """What a class and its bases define as a method, without hooks, in the order in which it is looked up."""
    found = (names[name] for each in kind.__mro__ if name in (names := dictionary_of(each)))
    return (getattr(each, _ORIGINAL, each) for each in found)


def _resolved(kind: type, name: str) -> Any:
    return next(_defined(kind, name))


def can_be_hooked(kind: type) -> bool:
    can_be_changed = kind.__flags__ & _CHANGEABLE and not kind.__flags__ & _IMMUTABLE
    meta: Any = type(kind)
    sets = [dictionary_of(each).get("__setattr__") for each in meta.__mro__ if each not in (type, object)]
    can_be_changed = can_be_changed and not any(isinstance(each, types.WrapperDescriptorType) for each in sets)
    return bool(can_be_changed) and _resolved(kind, "__getattribute__") is object.__getattribute__


def calling_frame() -> types.FrameType | None:
    """The function that has caused a lookup: this one, what notes it, and the hook are called for it."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = frame and frame.f_back
    return frame


def is_at(frame: types.FrameType, offsets: Callable[[types.CodeType], Set[int]]) -> bool:
    """Whether a function is just now at one of these instructions of its code."""
    at, code = frame.f_lasti, frame.f_code.co_code
    while dis.opname[code[at]] == "CACHE":
        at -= 2
    return at in offsets(frame.f_code)


class _Hook:
    """What a class has for the time that somebody watches it."""

    lock = threading.RLock()
    by_class: dict[type, _Hook] = {}  # noqa: RUF012

    def __init__(self, kind: type) -> None:
        self.notes: tuple[Callable[[Any, str], None], ...] = ()
        self._kind = kind
        self._own = {name: member for name, member in dictionary_of(kind).items() if name in _HOOKED}
        self._hooks = {name: self._hook(_resolved(kind, name)) for name in _HOOKED}
        for name, hook in self._hooks.items():
            type.__setattr__(kind, name, hook)

    def _hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def hook(value: Any, name: str, *args: Any) -> Any:
            for note in () if hasattr(_ours, "looks") else self.notes:
                note(value, name)
            return original(value, name, *args)

        vars(hook)[_ORIGINAL] = original
        return hook

    def remove(self) -> None:
        for name, hook in self._hooks.items():
            if dictionary_of(self._kind).get(name) is not hook:
                continue  # somebody has set another one
            if name in self._own:
                type.__setattr__(self._kind, name, self._own[name])
            else:
                type.__delattr__(self._kind, name)


@contextmanager
def hooked(kind: type, note: Callable[[Any, str], None]) -> Iterator[None]:
    with _Hook.lock:
        hook = _Hook.by_class.get(kind) or _Hook.by_class.setdefault(kind, _Hook(kind))
        hook.notes = (*hook.notes, note)
    try:
        yield
    finally:
        with _Hook.lock:
            notes = [*hook.notes]
            notes.remove(note)
            hook.notes = tuple(notes)
            if not notes:
                del _Hook.by_class[kind]
                hook.remove()
