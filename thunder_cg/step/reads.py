"""What a function reads from outside of its arguments, found in its bytecode: globals, closures and their attributes.

``opt.step()`` reads the global or the variable of a closure ``opt``; ``self.cfg.scale`` the attribute of an attribute
of what a method is bound to. The functions and methods of the user's that are called this way are looked into as well.

Note [Packages]
    Of the functions of an installed package only those are looked into that a capture has seen to run. Their code is
    taken to be constant, so of what they read only data counts: a global of their module, a registry, what a class or
    an object has. Python's library, PyTorch, Thunder and what these two use are taken to be constant as a whole, except
    for PyTorch's settings: those in C++ are compared by themselves (see `states_outside`), those that are plain values
    of its modules where a function that has run reads them (`settings_in`).

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
import dis
import inspect
import os
import sys
import sysconfig
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, partialmethod
from glob import escape as glob_escape, glob
from importlib.util import resolve_name
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import thunder
import torch
from torch import nn

from thunder_cg.compat.guards import dictionary_of, module_dictionaries, names_of
from thunder_cg.compat.lines import PACKAGES, is_torchs
from thunder_cg.compat.torch import IS_PROFILING
from thunder_cg.compat.torch_compile import function_before_dynamo, is_compiled_by_dynamo


def _folders_of_packages() -> list[str]:
    """Of Python's path, those that something was installed into. That of the program itself is none."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    users = {os.getcwd(), os.path.dirname(os.path.abspath(main or ""))}
    folders = {os.path.abspath(folder) for folder in sys.path} - users
    return [folder for folder in folders if glob(os.path.join(glob_escape(folder), "*.dist-info"))]


MISSING = object()  # what a read yields that raises now
# Where packages are installed, in this environment and those below it. Some are elsewhere, as this one may be.
_PACKAGES = (
    *PACKAGES,
    *(folder + os.sep for folder in _folders_of_packages()),
    *(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")),
)
_CONSTANT = (
    sysconfig.get_paths()["stdlib"] + os.sep,
    *(os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (torch, thunder)),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<frozen",
)
CONSTANT_PACKAGES = {
    *("torch", "cuda", "functorch", "mpmath", "networkx", "numpy", "opt_einsum", "sympy", "torchgen", "triton"),
    *("thunder", "thunder_cg", "nvfuser", "nvfuser_direct", "optree"),
}
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
_OF_TWO = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
_LOCALS = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"}
_ONE_VALUE = {"LOAD_CONST", *_LOCALS}
_VARIABLES = {"LOAD_GLOBAL", "LOAD_DEREF", *_LOCALS}
_LOADS = {"LOAD_ATTR", "LOAD_CONST", *_VARIABLES}
_STORES = {"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR"}
GROWING = list, deque  # see Note [What only grows]
_ADDED_TO = "+="  # in the place of an attribute: the code only adds to what the names before it lead to
_ADDS = {"+=", "-=", "+", "-", "INPLACE_ADD", "INPLACE_SUBTRACT", "BINARY_ADD", "BINARY_SUBTRACT"}
_GROWS = {"append", "extend"}
_LOOKUPS = {"LOAD_ATTR", "LOAD_METHOD"}
_DICTIONARIES = dict, OrderedDict, defaultdict
_COPIES = {"COPY", "DUP_TOP", "DUP_TOP_TWO"}
_NEUTRAL = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", *_COPIES}  # what was loaded last stays on top of the stack


@dataclass(frozen=True, slots=True)
class _Item:
    """In the place of an attribute: what a dictionary has by a key that is written in the code."""

    key: Any
    method: str = ""  # by which it is looked up


@dataclass(frozen=True, slots=True)
class _Chain:
    """A name in a code object, and attributes of its value: ``self.cfg.scale``."""

    scope: str  # "global", "cell", "local" or "import"
    name: str
    attributes: tuple[Any, ...] = ()  # names, or an `_Item`


Path = tuple[Any, tuple[str, ...]]  # a namespace, a cell or an object, and the names from there on


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
    found: dict[Any, Read] = {}
    seen: set[Any] = set()
    rooted: set[int] = set()  # modules of which all attributes are facts
    compiled: set[Any] = set()  # places that compiled functions read
    waiting: list[tuple[Any, bool]] = [(each, False) for each in (*called, *modules, fn)]  # the last comes first
    while waiting:
        next_fn, in_compiled = waiting.pop()
        in_compiled = in_compiled or is_compiled(next_fn)
        if isinstance(next_fn, nn.Module):
            rooted.update(map(id, next_fn.modules()))
            below = compiled_modules(next_fn)
            for module in next_fn.modules():
                if (forward := _forward_of(module)) is not None:
                    waiting.append((Called(forward, module), in_compiled or id(module) in below))
        if isinstance(bound := _compiled_from(next_fn) or next_fn, partial):
            name = getattr(_function_of(bound)[0], "__name__", "partial")
            found.setdefault((id(bound), "partial"), Read(name, partial(value_of, bound, ())))
        function, owner = next_fn if isinstance(next_fn, Called) else _function_of(next_fn)
        waiting += ((each, in_compiled) for each in _decorated(next_fn, owner))
        if function is None or (key := (function.__code__, *_outside_of(function, owner), in_compiled)) in seen:
            continue
        seen.add(key)
        of_package = is_installed(function.__code__.co_filename)  # see Note [Packages]
        for place, read in reads_in(function, owner, id(owner) in rooted):
            value = read.get()
            is_method = isinstance(value, _METHODS) and not isinstance(value.__self__, types.ModuleType)
            if of_package and (value is MISSING or not (is_method or is_data(value))):
                continue  # of which there are many
            read = replace(read, only_grows=read.only_grows and not in_compiled)
            called_function, _ = _function_of(value)
            runs = called_function is not None and not is_installed(called_function.__code__.co_filename)
            if runs or isinstance(value, nn.Module):
                waiting.append((value, in_compiled))
            if in_compiled:
                compiled.update((place, (place, "owner")))
            label = read.label.rpartition(".")[0] or read.label
            if read.only_grows:
                found.setdefault((place, "number"), read)
            elif _grows_a_list(value) and not in_compiled:
                get, path = partial(_owner_of, read.get), read.path and (read.path[0], read.path[1][:-1])
                found.setdefault((place, "list"), replace(read, label=label, get=get, path=path, only_grows=True))
            elif is_method:
                path = read.path and (read.path[0], read.path[1][:-1])
                get = partial(_owner_of, read.get)
                owner_read = replace(read, label=label, get=get, path=path, is_owner=runs, is_code=True)
                found.setdefault((place, "owner"), owner_read)
                if not of_package:
                    found.setdefault(place, replace(read, get=partial(_method_of, read.get), is_code=True))
            else:
                is_constant_name = isinstance(value, (types.ModuleType, type)) and not may_change(value)
                found.setdefault(place, replace(read, is_code=is_constant_name or _is_function(value)))
    return _with_names(found, compiled)


def _decorated(value: Any, owner: Any) -> Iterator[Called]:
    """What decorators have returned, which `_function_of` looks through, but for functions that are constant."""
    value = getattr(value, "__func__", value)
    while not isinstance(value, nn.Module) and "__wrapped__" in names_of(value):
        is_function = isinstance(value, types.FunctionType)
        function, bound = (value, owner) if is_function else (_of_class(value, "__call__"), value)
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


def numbered(label: str, count: int) -> str:
    """A name for the thing of this name that comes after ``count - 1`` others."""
    return label if count == 1 else f"{label} (the {count}. of this name)"


def is_compiled(value: Any) -> bool:
    """Whether Thunder or Dynamo compiles a function or a module."""
    return thunder.compile_data(value) is not None or is_compiled_by_dynamo(value)


def compiled_modules(root: nn.Module) -> set[int]:
    """The identities of the modules in another one that Thunder or Dynamo compiles, with those inside of them."""
    return {id(inner) for module in root.modules() if is_compiled(module) for inner in module.modules()}


def _forward_of(module: nn.Module) -> types.FunctionType | None:
    """The ``forward`` of a module, if it is the user's."""
    forward: Any = inspect.unwrap(_of_class(module, "forward"))
    is_users = isinstance(forward, types.FunctionType) and not is_installed(forward.__code__.co_filename)
    return forward if is_users else None


def is_data(value: Any) -> bool:
    """Whether a value is no code."""
    return not isinstance(value, _CODE)


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType))


def _grows_a_list(value: Any) -> bool:
    is_lists = isinstance(value, types.BuiltinMethodType) and type(value.__self__) in GROWING
    return is_lists and value.__name__ in _GROWS


def _owner_of(get: Callable[[], Any]) -> Any:
    """What a method is bound to: each look-up makes a new method."""
    return getattr(get(), "__self__", MISSING)


def _method_of(get: Callable[[], Any]) -> Any:
    """Which function of its owner a method is."""
    method = get()
    return getattr(method, "__func__", None) or getattr(method, "__name__", MISSING)


def links_of(path: Path) -> list[tuple[Any, str, Any]] | None:
    """What has to be the same for names to lead to the same function or method.

    Each is a namespace, a cell or an object, a name, and what it has of its own under the name. None if the names lead
    through anything else, such as a property.
    """
    value, names = path
    links: list[tuple[Any, str, Any]] = []
    if isinstance(value, types.CellType):
        links.append((value, "", value := _in_cell(value, ())))
    for i, name in enumerate(names):
        if isinstance(value, type) or value is MISSING:
            return None
        own = value if type(value) is dict else names_of(value)
        links.append((own if isinstance(value, (dict, types.ModuleType)) else value, name, own.get(name, MISSING)))
        if name not in own and i == 0 and own is value:
            own = builtins_of(own)
            links.append((own, name, own.get(name, MISSING)))
        if name in own:
            value = own[name]
            continue
        for kind in type(value).__mro__:
            names_of_kind = dictionary_of(kind)
            links.append((names_of_kind, name, found := names_of_kind.get(name, MISSING)))
            if found is not MISSING:
                break
        is_method = found is not MISSING and (_is_function(found) or isinstance(_unwrapped(found), types.FunctionType))
        if not is_method or i < len(names) - 1:
            return None
    return links


def _function_of(value: Any) -> tuple[types.FunctionType | None, Any]:
    """The Python function that a call of ``value`` runs, and what it is bound to; None for anything else."""
    while (inner := value.func if isinstance(value, partial) else _compiled_from(value)) is not None:
        value = inner
    if isinstance(value, types.MethodType):
        function = _unwrapped(value.__func__)
        return (function, value.__self__) if isinstance(function, types.FunctionType) else (None, None)
    if isinstance(value := _unwrapped(value), types.FunctionType):
        return value, None
    call = getattr(type(value), "forward" if isinstance(value, torch.nn.Module) else "__call__", None)
    return (call, value) if isinstance(call, types.FunctionType) else (None, None)


def _compiled_from(value: Any) -> Any:
    """The method, or function with arguments bound to it, that Dynamo has compiled to ``value``; None for others."""
    original = function_before_dynamo(value)
    return original if isinstance(original, (partial, types.MethodType)) else None


def _unwrapped(value: Any) -> Any:
    """What a decorator wraps, such as ``torch.no_grad()``, ``torch.compile`` and ``thunder.jit``, if it says so."""
    own = names_of(value)
    if isinstance(value, nn.Module) or not isinstance(own.get("__wrapped__"), types.FunctionType):
        return value
    return inspect.unwrap(value)


def is_users(value: types.ModuleType | type) -> bool:
    """Whether a module or a class is not of an installed package."""
    file = _file_of(value)
    return file is not None and not is_installed(file)


def may_change(value: types.ModuleType | type) -> bool:
    """Whether what a module or a class defines is looked at. See Note [Packages]."""
    file = _file_of(value)
    return file is not None and not is_constant(file)


def _file_of(value: types.ModuleType | type) -> str | None:
    """The source file of a module or a class; "" for the main program."""
    name = value.__module__ if isinstance(value, type) else value.__name__
    module = sys.modules.get(name) if isinstance(value, type) else value
    return "" if name == "__main__" else getattr(module, "__file__", None)


@cache
def is_installed(filename: str) -> bool:
    """Whether a source file belongs to an installed package or to the standard library."""
    return any(packages in filename for packages in _PACKAGES) or filename.startswith(_CONSTANT)


@cache
def is_constant(filename: str) -> bool:
    """Whether nothing that a source file defines is looked at: see Note [Packages]."""
    package = next((filename.rpartition(each)[2] for each in _PACKAGES if each in filename), None)
    if package is not None:
        return package.partition(os.sep)[0] in CONSTANT_PACKAGES
    return filename.startswith(_CONSTANT)


def reads_in(function: types.FunctionType, owner: Any, is_rooted: bool = False) -> Iterator[tuple[Any, Read]]:
    """What one function reads, and where each is. Of an owner that is looked at in any case, only what is not."""
    code, variables = function.__code__, function.__globals__
    cells = dict(zip(code.co_freevars, function.__closure__ or ()))
    bound = {code.co_varnames[0]: owner} if owner is not None and code.co_argcount else {}
    of_package = is_installed(code.co_filename)
    for chain, line in chains(code).items():
        name, attributes = chain.name, chain.attributes
        at = "" if of_package else f"{os.path.basename(code.co_filename)}:{line}"
        label = name
        if of_package and name in bound:
            label = (owner if isinstance(owner, type) else type(owner)).__name__
        elif of_package:
            label = f"{variables.get('__name__') if chain.scope == 'global' else function.__name__}.{name}"
        if name in bound and chain.scope != "global":
            place, read = _read(label, at, owner, (), attributes, partial(value_of, owner))
            is_seen = is_rooted and attributes and _has(owner, attributes[0])
            if not is_seen or read.only_grows or _grows_a_list(read.get()):
                yield place, read
        elif chain.scope == "cell" and name in cells:
            yield _read(label, at, cells[name], (), attributes, partial(_in_cell, cells[name]))
        elif chain.scope == "global" and not (of_package and name not in variables and hasattr(builtins, name)):
            yield _read(label, at, variables, (name,), attributes, partial(_in_globals, variables, name))
        elif chain.scope == "import" and (module := _imported(name, variables)) is not None:
            yield _read(module, at, sys.modules, (module,), attributes, partial(_in_globals, sys.modules, module))
    for what in () if of_package else ("__code__", "__defaults__", "__kwdefaults__"):
        if getattr(function, what) is not None:
            place = code if what == "__code__" else id(function)
            yield (place, what), Read(f"{function.__name__}.{what}", partial(getattr, function, what))


def _read(
    label: str, line: str, start: Any, names: tuple[str, ...], attributes: tuple[Any, ...], look_up: Callable[..., Any]
) -> tuple[Any, Read]:
    """A read of attributes up to a tensor, a property, or what has a computed attribute.

    What a tensor has belongs to it. A property is a function that is called, and not to be compared. What is computed
    is not looked up, since that may change something: all of its owner is compared, and what runs is seen in a capture.

    Args:
        start, names: where the path to the first value begins.
        look_up: what attributes of that value lead to.
    """
    get, only_grows = partial(look_up, attributes), False
    for i, name in enumerate(attributes):
        owner = look_up(attributes[:i])
        if name == _ADDED_TO:
            attributes, only_grows = attributes[:i], type(owner) is int
            get = partial(look_up, attributes)
            break
        if isinstance(name, _Item) and name.method and type(owner) not in _DICTIONARIES:
            return _read(label, line, start, names, (*attributes[:i], name.method), look_up)
        if isinstance(name, _Item):
            value, is_number = look_up(attributes[: i + 1]), attributes[i + 1 :] == (_ADDED_TO,)
            if is_number and type(value) is int:
                where, get = (*attributes[:i], name.key), partial(look_up, attributes[: i + 1])
                path, label = (start, (*names, *where)), f"{'.'.join((label, *attributes[:i]))}[{name.key!r}]"
                return (id(start), *names, *where), Read(label, get, path=path, line=line, only_grows=True)
            if not is_number and type(value) in GROWING:
                label = f"{'.'.join((label, *attributes[:i]))}[{name.key!r}].{attributes[-1]}"
                return (id(start), *names, *attributes), Read(label, get, line=line)
            attributes = attributes[:i]
            get = partial(look_up, attributes)
            break
        if _property_of(owner, name) is not None:
            get = partial(_bound_property, partial(look_up, attributes[:i]), name)
            attributes = attributes[: i + 1]
            break
        if (isinstance(owner, torch.Tensor) and name not in vars(owner)) or _is_computed(owner, name):
            attributes = attributes[:i]
            get = partial(look_up, attributes)
            break
    path = start, (*names, *attributes)
    return (id(start), *path[1]), Read(".".join((label, *attributes)), get, path=path, line=line, only_grows=only_grows)


def _property_of(owner: Any, name: str) -> types.FunctionType | None:
    """The function of a property, if it may change anything or be changed."""
    if isinstance(owner, (torch.Tensor, types.ModuleType, type)):
        return None
    member = _of_class(owner, name)
    function: Any = member.fget if isinstance(member, property) else None
    if isinstance(member, cached_property) and name not in names_of(owner):
        function = member.func
    is_open = isinstance(function, types.FunctionType) and not is_constant(function.__code__.co_filename)
    return function if is_open else None


def _of_class(value: Any, name: str) -> Any:
    """What the class of a value, or a base of it, has by a name; None if that is nothing."""
    return next((names[name] for kind in type(value).__mro__ if name in (names := dictionary_of(kind))), None)


def _is_computed(owner: Any, name: str) -> bool:
    """Whether Python of the user's or of PyTorch's runs for a lookup, as for a weight that is parametrized."""
    if isinstance(owner, (types.ModuleType, type)):
        return isinstance(owner, type) and name == "__dict__"  # which is a new proxy each time
    member = _of_class(owner, name)
    if isinstance(member, partialmethod):  # whose lookup makes a new one
        return True
    is_own = _has(owner, name) if isinstance(owner, nn.Module) else name in names_of(owner)
    functions = [_of_class(owner, "__getattribute__")]
    if isinstance(member, property):
        functions.append(member.fget)
    elif member is not None and not (is_own and _of_class(member, "__set__") is None):
        functions.append(_of_class(member, "__get__"))
    elif member is None and not is_own:
        functions.append(_of_class(owner, "__getattr__"))
    files = [each.__code__.co_filename for each in functions if isinstance(each, types.FunctionType)]
    is_module = isinstance(owner, nn.Module) and member is None  # whose own lookup changes nothing
    return any(not is_installed(file) or (is_torchs(file) and not is_module) for file in files)


def _bound_property(get: Callable[[], Any], name: str) -> Any:
    function = _property_of(owner := get(), name)
    return MISSING if function is None else types.MethodType(function, owner)


def settings_in(
    functions: Mapping[types.CodeType, dict[str, Any]], getters: Iterable[Callable[[], Any]] = ()
) -> list[tuple[Callable[[], Any], Any]]:
    """How to look up each plain value that functions of PyTorch's read by a name, and the value by now.

    Args:
        functions: their code and their globals.
        getters: functions of C that may return such a value. Some of them take arguments.
    """
    found: dict[Any, Callable[[], Any]] = {getter: partial(_called, getter) for getter in getters}
    for code, variables in functions.items():
        if str(variables.get("__name__")).startswith(_WITHOUT_SETTINGS):
            continue
        for chain in chains(code):
            attributes = tuple(takewhile(lambda each: each != _ADDED_TO and isinstance(each, str), chain.attributes))
            name = (attributes or (chain.name,))[-1]
            if name.isupper() or name == IS_PROFILING:
                continue  # a constant, or what no result depends on
            module = _imported(chain.name, variables) if chain.scope == "import" else None
            if chain.scope == "global" and chain.name in variables:
                found[id(variables), chain.name, attributes] = partial(_in_globals, variables, chain.name, attributes)
            elif module is not None:
                found[module, attributes] = partial(_in_globals, sys.modules, module, attributes)
    values = [(get, get()) for get in found.values()]
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


def _has(module: nn.Module, name: str) -> bool:
    """Whether the module itself has an attribute, and not its class."""
    return any(name in attributes for attributes in module_dictionaries(module))


def own(value: Any, name: str) -> Any:
    """An attribute as Python looks it up, around what a class or somebody who watches it does about that."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return MISSING


def value_of(value: Any, attributes: tuple[Any, ...]) -> Any:
    """What attributes lead to, one after the other; `MISSING` if one is not there. What a tensor has is its own."""
    try:
        for name in attributes:
            if isinstance(name, _Item):
                value = dict.get(value, name.key, MISSING) if type(value) in _DICTIONARIES else MISSING
                continue
            if isinstance(value, torch.Tensor) and name not in vars(value):
                break  # what it holds, and its gradient, is looked at with it
            value = getattr(value, name)
    except Exception:
        return MISSING
    return value


def content_of_cell(cell: types.CellType) -> Any:
    """What a variable of a closure has; `MISSING` if that is nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _in_cell(cell: types.CellType, attributes: tuple[Any, ...]) -> Any:
    value = content_of_cell(cell)
    return value_of(value, attributes) if attributes and value is not MISSING else value


def builtins_of(variables: dict[str, Any]) -> dict[str, Any]:
    """Where Python looks for a name that the global variables do not have."""
    found = variables.get("__builtins__", {})
    return vars(found) if isinstance(found, types.ModuleType) else found


def _in_globals(variables: dict[str, Any], name: str, attributes: tuple[Any, ...]) -> Any:
    value = variables.get(name, MISSING)
    if value is MISSING:
        value = builtins_of(variables).get(name, MISSING)
    return value_of(value, attributes) if attributes and value is not MISSING else value


@cache
def growing(code: types.CodeType) -> Set[int]:
    """Where the code looks an attribute up, or stores it, only to add to it: see Note [What only grows]."""
    found: set[int] = set()
    each_of = [*instructions(code)]
    for before, each in pairwise(each_of):
        if each.value == _ADDED_TO and before.name == "LOAD_ATTR" and not isinstance(before.value, _Item):
            rest = each_of[each_of.index(before) :]
            found.update([before.offset, next(x.offset for x in rest if x.name == "STORE_ATTR")])
        elif each.name in _LOOKUPS and each.value in _GROWS and before.name == "LOAD_ATTR":
            found.add(before.offset)
    return found


@cache
def sets_variables(code: types.CodeType) -> bool:
    """Whether the code, or a function in it, sets a variable of the function around it."""
    inner = any(isinstance(each, types.CodeType) and sets_variables(each) for each in code.co_consts)
    stores = (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")
    return inner or not {*code.co_freevars}.isdisjoint(stores)


@cache
def chains(code: types.CodeType) -> Mapping[_Chain, int]:
    """What the code and the functions in it load or store, in the order of the code, each with a line.

    It is the first one that names it and stores an attribute, an item or a variable, if one does, else the first one.
    """
    found: dict[_Chain, list[int]] = {}
    stores = {line for name, _, line, _ in instructions(code) if name in _STORES}
    aliases: dict[str, _Chain | None] = {}  # variables of the function that stand for a chain; None: for several
    current: _Chain | None = None
    current_line = code.co_firstlineno
    imported: _Chain | None = None  # what the names after IMPORT_FROM are attributes of
    is_dotted = False
    arguments: deque[Any] = deque([0, None], maxlen=2)  # of the last two instructions

    def end() -> None:
        if current is not None:
            found.setdefault(current, []).append(current_line)

    for name, value, line, _ in instructions(code):
        level, names = arguments
        arguments.append(value)
        if name in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and current is not None:
            current, current_line = _Chain(current.scope, current.name, (*current.attributes, value)), line
            if name != "STORE_ATTR":
                continue
        names_module = current is not None and current.scope == "import" and not current.attributes
        if not (names_module and name in ("IMPORT_FROM", "STORE_FAST")):
            end()  # a name for a whole module reads nothing of it
        if name == "STORE_FAST" and current is not None:
            aliases[value] = None if value in aliases else current
        elif name == "STORE_FAST":
            aliases[value] = None
        if name == "IMPORT_NAME":
            current = imported = _Chain("import", "." * level + value if names else value.partition(".")[0])
            is_dotted = not names
        elif name == "IMPORT_FROM" and imported is not None:
            current = _Chain("import", imported.name, (*imported.attributes, value))
            imported = current if is_dotted else imported  # of ``import a.b as c``
        else:
            current = _begun(name, value, aliases)
        current_line = line
        if name in ("STORE_GLOBAL", "STORE_DEREF"):
            end()
            current = None
    end()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for chain, line in chains(constant).items():
                if chain.scope in ("global", "import") or (chain.scope == "cell" and chain.name in code.co_freevars):
                    found.setdefault(chain, [line])
                elif chain.scope == "cell" and chain.name in code.co_varnames[:1]:
                    found.setdefault(_Chain("local", chain.name, chain.attributes), [line])
    return {chain: next((line for line in lines if line in stores), lines[0]) for chain, lines in found.items()}


class _Instruction(NamedTuple):
    name: str
    value: Any
    line: int
    offset: int


def instructions(code: types.CodeType) -> Iterator[_Instruction]:
    """The names and arguments of the instructions, with their lines.

    Python 3.13 has one instruction for two variables, which are two here.
    """
    starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    found: list[_Instruction] = []
    copied: set[int] = set()  # that follow a copy of what is on top of the stack
    before = ""
    for each in dis.get_instructions(code):
        line = starts.get(each.offset) or line
        names = _OF_TWO.get(each.opname)
        if before in _COPIES:
            copied.add(len(found))
            if found and found[-1].name == "INPLACE_ADD":  # the sum is read, too, as i is in ``x.n = i = x.n + 1``
                found[-1] = found[-1]._replace(name=before)
        before = each.opname if each.opname not in ("CACHE", "EXTENDED_ARG") else before
        for name, value in ((each.opname, each.argval),) if names is None else zip(names, each.argval):
            if name not in _NEUTRAL:
                name = "INPLACE_ADD" if not _ADDS.isdisjoint((name, each.argrepr)) else name
                found.append(_Instruction(name, value, line, each.offset))
    rest = iter(range(len(found)))
    for i in rest:
        one = found[i]
        is_variable = _adds_to_a_variable(found[i : i + 4])
        is_item = [each.name for each in found[i : i + 2]] == ["LOAD_CONST", "BINARY_SUBSCR"]
        added = _added_to(found, i + is_item, copied) if is_item or one.name == "LOAD_ATTR" else None
        if is_item and (added or _is_lookup(found[i + 2], _GROWS)):
            next(rest)
            one = one._replace(name="LOAD_ATTR", value=_Item(one.value))
        elif _makes_a_list(found[i : i + 5]):
            [next(rest) for _ in range(3)]
            one = one._replace(name="LOAD_ATTR", value=_Item(found[i + 1].value, str(one.value)))
        yield one
        if is_variable or added:
            yield one._replace(name="LOAD_ATTR", value=_ADDED_TO)
        if is_variable:
            yield found[i + 1]
            [next(rest) for _ in range(3)]
        elif added:
            yield from (found[next(rest)] for _ in range(added[0] - i - 1 - is_item))
            [next(rest) for _ in range(*added)]


def _is_lookup(instruction: _Instruction, names: Set[str]) -> bool:
    return instruction.name in _LOOKUPS and instruction.value in names


def _makes_a_list(found: list[_Instruction]) -> bool:
    """Whether they are those of ``.setdefault("loss", []).append``."""
    names = [each.name for each in found[1:4]]
    is_call = names[:2] == ["LOAD_CONST", "BUILD_LIST"] and found[2].value == 0 and names[2].startswith("CALL")
    return is_call and _is_lookup(found[0], {"setdefault"}) and _is_lookup(found[4], _GROWS)


def _added_to(found: list[_Instruction], i: int, copied: Set[int]) -> tuple[int, int] | None:
    """Which instructions tell nothing more if an attribute or an item is loaded only to add to it; None if it is not.

    In ``x.n = x.n + 1`` it is the second ``x``.

    Args:
        i: of what loads it.
        copied: what follows a copy of what is on top of the stack, as in ``x.n += 1``, where nothing is loaded twice.
    """
    load, is_item = found[i], found[i].name == "BINARY_SUBSCR"
    kind = "STORE_SUBSCR" if is_item else "STORE_ATTR"
    store = next((at for at in range(i, len(found)) if found[at].name == kind), i)
    if store == i or (not is_item and found[store].value != load.value):
        return None
    if i in copied:
        last = next((each for each in reversed(found[i:store]) if not each.name.startswith(("SWAP", "ROT_"))), load)
        return (i + 1, i + 1) if last.name == "INPLACE_ADD" else None
    again, before = (
        [each[:2] for each in found[max(0, at) : end]] for at, end in ((i + 3, store), (2 * i + 3 - store, i))
    )
    adds = found[i + 1].name in _ONE_VALUE and found[i + 2].name == "INPLACE_ADD"
    is_same = adds and again == before and again[0][0] in _VARIABLES
    # A property among the attributes might give two objects, which `_read` sees for items alone.
    return (i + 3, store) if is_same and (is_item or len(again) == 1) and _LOADS.issuperset(dict(again)) else None


def _adds_to_a_variable(instructions: list[_Instruction]) -> bool:
    """Whether they are those of ``n += 1`` or ``n = n + size``."""
    names = [each.name for each in instructions]
    if names[2:] not in (["INPLACE_ADD", "STORE_GLOBAL"], ["INPLACE_ADD", "STORE_DEREF"]):
        return False
    is_same = names[0].removeprefix("LOAD_") == names[3].removeprefix("STORE_")
    return is_same and instructions[0].value == instructions[3].value and names[1] in _ONE_VALUE


def _begun(name: str, value: Any, aliases: dict[str, _Chain | None]) -> _Chain | None:
    """The chain that an instruction begins, if it loads or stores a variable."""
    if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL"):
        return _Chain("global", value)
    if name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "STORE_DEREF"):
        return _Chain("cell", value)
    if name in _LOCALS:
        return aliases.get(value) or _Chain("local", value)
    return None
