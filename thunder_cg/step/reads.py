"""What a function reads from outside of its arguments, found in its bytecode: globals, closures and their attributes.

``opt.step()`` reads the global or the variable of a closure ``opt``; ``self.cfg.scale`` the attribute of an attribute
of what a method is bound to. The functions and methods of the user's that are called this way are looked into as well,
and those of packages as Note [Packages] says.

Note [What only grows]
    ``losses.append(loss)`` and ``losses.extend(...)`` read nothing of the list, so nothing of it has to be as it was: a
    replay appends to the list that is there. If the step reads the list in any other way, that is another read, and
    all of the list is compared. It may be a deque, or an item of a dictionary: ``history["loss"].append(loss)`` and
    ``history.setdefault("loss", []).append(loss)`` read only which list that is. So it is with an integer that the step
    only adds to, as in ``self.steps += 1`` or ``stats["steps"] = stats["steps"] + 1``: a replay adds what the capture
    has added.
"""

from __future__ import annotations

import builtins
import inspect
import os
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import resolve_name
from itertools import takewhile
from typing import Any, NamedTuple

import thunder
import torch
from torch import nn
from torch.optim import Optimizer

from thunder_cg.compat.guards import names_of
from thunder_cg.compat.torch import IS_PROFILING
from thunder_cg.compat.torch_compile import function_before_dynamo, is_compiled_by_dynamo
from thunder_cg.step.bytecode import ADDED_TO, GROWS, PARAMETERS, Item, chains
from thunder_cg.step.facts import numbered
from thunder_cg.step.lookups import (
    DICTIONARIES,
    MISSING,
    Path,
    bound_property,
    has_own,
    in_cell,
    in_globals,
    is_computed,
    is_function,
    of_class,
    property_of,
    unwrapped,
    value_of,
)
from thunder_cg.step.packages import is_constant, is_installed, may_change

_SIMPLE = (bool, int, float, str, type(None), torch.dtype)
# Modules. That of handles counts the hooks that were registered; hooks themselves are compared.
_WITHOUT_SETTINGS = (
    *("torch._dynamo", "torch._inductor", "torch._logging", "torch.autograd.profiler", "torch.utils.hooks"),
)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ModuleType, type, classmethod, staticmethod, property, cached_property,
)  # fmt: skip
GROWING = list, deque  # see Note [What only grows]


@dataclass(frozen=True, slots=True)
class Read:
    """One value that a function reads, as the user wrote it, and how to look it up again."""

    label: str
    get: Callable[[], Any]
    is_owner: bool = False  # of methods that were looked into, so that what they read of it is known
    place: Any = None  # equal for reads of the same variable
    path: Path | None = None
    line: str = ""  # of the user's code that names it
    is_code: bool = False  # whether it is a function or a method
    is_compiled: bool = False  # whether Thunder or Dynamo compiles what reads it
    only_grows: bool = False  # see Note [What only grows]


class Called(NamedTuple):
    """A function of the user's that is called, and what it is bound to, if it is a method."""

    function: types.FunctionType
    owner: Any


def reads_of(fn: Callable[..., Any], modules: Iterable[nn.Module] = (), called: Iterable[Called] = ()) -> list[Read]:
    """What a function, and the user's functions that it calls, read from outside: each place once.

    Args:
        modules: that it uses without naming them.
        called: more functions that it is known to call.
    """
    search = _Search((*called, *modules, fn))
    while search.waiting:
        search.look_into(*search.waiting.pop())
    return _with_names(search.found, search.compiled)


class _Search:
    """What functions read, and which functions they call, which are looked into as well.

    Attributes:
        waiting: functions and modules, the next one last, and whether what is compiled calls them.
        found: the reads, by their places.
        compiled: places that compiled functions read.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        self.waiting = [(each, False) for each in functions]
        self.found: dict[Any, Read] = {}
        self.compiled: set[Any] = set()
        self._seen: set[Any] = set()
        self._rooted: set[int] = set()  # modules of which all attributes are facts

    def look_into(self, value: Any, in_compiled: bool) -> None:
        in_compiled = in_compiled or is_compiled(value)
        if isinstance(value, nn.Module):
            self._rooted.update(map(id, value.modules()))
            below = compiled_modules(value)
            for module in value.modules():
                if (forward := _forward_of(module)) is not None:
                    self.waiting.append((Called(forward, module), in_compiled or id(module) in below))
        if isinstance(bound := _compiled_from(value) or value, partial):
            name = getattr(_function_of(bound)[0], "__name__", "partial")
            self.found.setdefault((id(bound), "partial"), Read(name, partial(value_of, bound, ())))
        function, owner = value if isinstance(value, Called) else _function_of(value)
        self.waiting += ((each, in_compiled) for each in _decorated(value, owner))
        if function is None or (key := (function.__code__, *_outside_of(function, owner), in_compiled)) in self._seen:
            return
        self._seen.add(key)
        of_package = is_installed(function.__code__.co_filename)  # see Note [Packages]
        for place, read in reads_in(function, owner, id(owner) in self._rooted):
            self._add(place, read, in_compiled, of_package)

    def _add(self, place: Any, read: Read, in_compiled: bool, of_package: bool) -> None:
        """Adds a read of a function: of a method what it is bound to, and which method it is."""
        value = read.get()
        is_method = isinstance(value, _METHODS) and not isinstance(value.__self__, types.ModuleType)
        if of_package and (value is MISSING or not (is_method or is_data(value))):
            return  # of which there are many
        read = replace(read, only_grows=read.only_grows and not in_compiled)
        function, _ = _function_of(value)
        runs = function is not None and not is_installed(function.__code__.co_filename)
        if runs or isinstance(value, nn.Module):
            self.waiting.append((value, in_compiled))
        if in_compiled:
            self.compiled.update((place, (place, "owner")))
        label, path = read.label.rpartition(".")[0] or read.label, read.path and (read.path[0], read.path[1][:-1])
        of_owner = replace(read, label=label, get=partial(_owner_of, read.get), path=path)
        if read.only_grows:
            self.found.setdefault((place, "number"), read)
        elif _grows_a_list(value) and not in_compiled:
            self.found.setdefault((place, "list"), replace(of_owner, only_grows=True))
        elif is_method:
            self.found.setdefault((place, "owner"), replace(of_owner, is_owner=runs, is_code=True))
            if not of_package:
                self.found.setdefault(place, replace(read, get=partial(_method_of, read.get), is_code=True))
        else:
            is_constant_name = isinstance(value, (types.ModuleType, type)) and not may_change(value)
            self.found.setdefault(place, replace(read, is_code=is_constant_name or is_function(value)))


def _decorated(value: Any, owner: Any) -> Iterator[Called]:
    """What decorators have returned, which `_function_of` looks through, but for functions that are constant."""
    value = getattr(value, "__func__", value)
    while not isinstance(value, nn.Module) and "__wrapped__" in names_of(value):
        is_function = isinstance(value, types.FunctionType)
        function, bound = (value, owner) if is_function else (of_class(value, "__call__"), value)
        if isinstance(function, types.FunctionType) and not is_constant(function.__code__.co_filename):
            yield Called(function, bound)
        value = value.__wrapped__


def _outside_of(function: types.FunctionType, owner: Any) -> Iterator[int]:
    """The identities of what its code reads that another function with the code may have otherwise."""
    values = function.__globals__, function.__defaults__, function.__kwdefaults__
    return map(id, (owner, *values, *(function.__closure__ or ())))


def _with_names(found: dict[Any, Read], compiled: Set[Any]) -> list[Read]:
    """The reads, with another label where several have the same."""
    labels: Counter[tuple[str, bool]] = Counter()
    reads = []
    for place, read in found.items():
        key = read.label, read.only_grows
        labels[key] += 1
        label = numbered(read.label, labels[key])
        reads.append(replace(read, label=label, place=place, is_compiled=place in compiled))
    return reads


def is_compiled(value: Any) -> bool:
    """Whether Thunder or Dynamo compiles a function or a module."""
    return thunder.compile_data(value) is not None or is_compiled_by_dynamo(value)


def compiled_modules(root: nn.Module) -> set[int]:
    """The identities of the modules in another one that Thunder or Dynamo compiles, with those inside of them."""
    return {id(inner) for module in root.modules() if is_compiled(module) for inner in module.modules()}


def _forward_of(module: nn.Module) -> types.FunctionType | None:
    """The ``forward`` of a module, if it is the user's."""
    forward: Any = inspect.unwrap(of_class(module, "forward"))
    is_users = isinstance(forward, types.FunctionType) and not is_installed(forward.__code__.co_filename)
    return forward if is_users else None


def is_data(value: Any) -> bool:
    """Whether a value is no code."""
    return not isinstance(value, _CODE)


def _grows_a_list(value: Any) -> bool:
    is_lists = isinstance(value, types.BuiltinMethodType) and type(value.__self__) in GROWING
    return is_lists and value.__name__ in GROWS


def _owner_of(get: Callable[[], Any]) -> Any:
    """What a method is bound to: each look-up makes a new method."""
    return getattr(get(), "__self__", MISSING)


def _method_of(get: Callable[[], Any]) -> Any:
    """Which function of its owner a method is."""
    method = get()
    return getattr(method, "__func__", None) or getattr(method, "__name__", MISSING)


def _function_of(value: Any) -> tuple[types.FunctionType | None, Any]:
    """The Python function that a call of ``value`` runs, and what it is bound to; None for anything else."""
    while (inner := value.func if isinstance(value, partial) else _compiled_from(value)) is not None:
        value = inner
    if isinstance(value, types.MethodType):
        function = unwrapped(value.__func__)
        return (function, value.__self__) if isinstance(function, types.FunctionType) else (None, None)
    if isinstance(value := unwrapped(value), types.FunctionType):
        return value, None
    call = of_class(value, "forward" if isinstance(value, torch.nn.Module) else "__call__")
    return (call, value) if isinstance(call, types.FunctionType) else (None, None)


def _compiled_from(value: Any) -> Any:
    """The method, or function with arguments bound to it, that Dynamo has compiled to ``value``; None for others."""
    original = function_before_dynamo(value)
    return original if isinstance(original, (partial, types.MethodType)) else None


def reads_in(function: types.FunctionType, owner: Any, is_rooted: bool = False) -> Iterator[tuple[Any, Read]]:
    """What one function reads, and where each is. Of an owner that is looked at in any case, only what is not."""
    code, variables = function.__code__, function.__globals__
    cells = dict(zip(code.co_freevars, function.__closure__ or ()))
    first = code.co_varnames[0 if code.co_argcount else code.co_kwonlyargcount :][:1]  # of ``*args``, all that is there
    takes_owner = owner is not None and (code.co_argcount or code.co_flags & inspect.CO_VARARGS)
    bound = dict.fromkeys(first if takes_owner else (), owner)
    of_package = is_installed(code.co_filename)
    for chain, line in chains(code).items():
        name, attributes = chain.name, chain.attributes
        at = "" if of_package else f"{os.path.basename(code.co_filename)}:{line}"
        label = name
        if name in bound and (of_package or not code.co_argcount):
            label = (owner if isinstance(owner, type) else type(owner)).__name__
        elif of_package:
            label = f"{variables.get('__name__') if chain.scope == 'global' else function.__name__}.{name}"
        path: Path
        if of_owner := name in bound and chain.scope != "global":
            path, look_up = (owner, ()), partial(value_of, owner)
        elif chain.scope == "cell" and name in cells:
            path, look_up = (cells[name], ()), partial(in_cell, cells[name])
        elif chain.scope == "global" and not (of_package and name not in variables and hasattr(builtins, name)):
            path, look_up = (variables, (name,)), partial(in_globals, variables, name)
        elif chain.scope == "import" and (module := _imported(name, variables)) is not None:
            label, path, look_up = module, (sys.modules, (module,)), partial(in_globals, sys.modules, module)
        else:
            continue
        place, read = _NamedVariable(label, at, path, look_up).read(attributes)
        is_seen = is_rooted and of_owner and (not attributes or has_own(owner, attributes[0]))
        if not is_seen or read.only_grows or _grows_a_list(read.get()):
            yield place, read
    for what in () if of_package else ("__code__", "__defaults__", "__kwdefaults__"):
        if getattr(function, what) is not None:
            place = code if what == "__code__" else id(function)
            yield (place, what), Read(f"{function.__name__}.{what}", partial(getattr, function, what))


@dataclass(frozen=True, slots=True)
class _NamedVariable:
    """A variable that code names with attributes, as `Chain` has them.

    Attributes:
        label, line: of the user's code.
        path: to the variable's value.
        look_up: what attributes of the value lead to.
    """

    label: str
    line: str
    path: Path
    look_up: Callable[[tuple[Any, ...]], Any]

    def read(self, attributes: tuple[Any, ...]) -> tuple[Any, Read]:
        """A read of attributes up to a tensor, a property, or what has a computed attribute; and its place.

        What a tensor has belongs to it. A property is a function that is called, and not to be compared. What is
        computed is not looked up, since that may change something: all of its owner is compared, and what runs is seen
        in a capture.
        """
        for i, name in enumerate(attributes):
            before = attributes[:i]
            owner = self.look_up(before)
            if name == ADDED_TO:
                return self._read(before, only_grows=type(owner) is int)
            if name == PARAMETERS:  # of an optimizer, they are compared with all else of it
                return self._read(before) if isinstance(owner, Optimizer) else self.read((*before, "param_groups"))
            if isinstance(name, Item) and name.method and type(owner) not in DICTIONARIES:
                return self.read((*before, name.method))
            if isinstance(name, Item):
                return self._grown_item(before, name, attributes[i + 1 :]) or self._read(before)
            if property_of(owner, name) is not None:
                return self._read((*before, name), partial(bound_property, partial(self.look_up, before), name))
            if (isinstance(owner, torch.Tensor) and name not in vars(owner)) or is_computed(owner, name):
                return self._read(before)
            if isinstance(owner, Optimizer) and is_function(names_of(owner).get(name)):  # a scheduler's, for its step
                return self._read(before)
        return self._read(attributes)

    def _read(
        self, attributes: tuple[Any, ...], get: Callable[[], Any] | None = None, *, only_grows: bool = False
    ) -> tuple[Any, Read]:
        start, names = self.path
        path, label = (start, (*names, *attributes)), ".".join((self.label, *attributes))
        get = partial(self.look_up, attributes) if get is None else get
        return (id(start), *path[1]), Read(label, get, path=path, line=self.line, only_grows=only_grows)

    def _grown_item(self, before: tuple[Any, ...], item: Item, rest: tuple[Any, ...]) -> tuple[Any, Read] | None:
        """What the code only adds to, a number or a tensor, or ``append`` of a list; None if it is something else."""
        start, names = self.path
        label, value = f"{'.'.join((self.label, *before))}[{item.key!r}]", self.look_up((*before, item))
        if rest == (ADDED_TO,) and type(value) in (int, torch.Tensor):
            path = start, (*names, *before, Item(item.key))
            get, is_number = partial(self.look_up, (*before, item)), type(value) is int
            return (id(start), *path[1]), Read(label, get, path=path, line=self.line, only_grows=is_number)
        if rest != (ADDED_TO,) and type(value) in GROWING:
            get, place = partial(self.look_up, (*before, item, *rest)), (id(start), *names, *before, item, *rest)
            return place, Read(f"{label}.{rest[-1]}", get, line=self.line)
        return None


def settings_in(
    functions: Mapping[types.CodeType, dict[str, Any]], getters: Iterable[Callable[[], Any]] = ()
) -> list[tuple[Callable[[], Any], Any]]:
    """How to look up each plain value that functions of PyTorch's read by a name, and the value by now.

    Args:
        functions: their code and their globals.
        getters: functions of C that may return such a value. Some of them take arguments.
    """
    lookups: dict[Any, Callable[[], Any]] = {getter: partial(_called, getter) for getter in getters}
    for code, variables in functions.items():
        if str(variables.get("__name__")).startswith(_WITHOUT_SETTINGS):
            continue
        for chain in chains(code):
            attributes = tuple(takewhile(lambda each: each != ADDED_TO and isinstance(each, str), chain.attributes))
            name = (attributes or (chain.name,))[-1]
            if name.isupper() or name == IS_PROFILING:
                continue  # a constant, or what no result depends on
            module = _imported(chain.name, variables) if chain.scope == "import" else None
            if chain.scope == "global" and chain.name in variables:
                lookups[id(variables), chain.name, attributes] = partial(in_globals, variables, chain.name, attributes)
            elif module is not None:
                lookups[module, attributes] = partial(in_globals, sys.modules, module, attributes)
    values = [(get, get()) for get in lookups.values()]
    return [(get, value) for get, value in values if type(value) in _SIMPLE]


def _called(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except (TypeError, RuntimeError):
        return MISSING


def _imported(name: str, variables: dict[str, Any]) -> str | None:
    """The name of a module that is imported in a function."""
    try:
        return resolve_name(name, variables.get("__package__"))
    except ImportError:
        return None
