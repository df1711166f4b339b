"""Looks values up by names, as Python does, where that runs no code of a class that could change something."""

from __future__ import annotations

import inspect
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import cached_property, partialmethod
from typing import Any

import torch
from torch import nn

from thunder_cg.compat.guards import dictionary_of, module_dictionaries, names_of
from thunder_cg.compat.lines import is_torchs
from thunder_cg.step.bytecode import Item
from thunder_cg.step.packages import is_constant, is_installed

MISSING = object()  # what a read yields that raises now
DICTIONARIES = dict, OrderedDict, defaultdict
Path = tuple[Any, tuple[str, ...]]  # a namespace, a cell or an object, and the names from there on


def own(value: Any, name: str) -> Any:
    """An attribute as Python looks it up, around what a class or somebody who watches it does about that."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return MISSING


def own_attributes(value: Any) -> dict[str, Any]:
    """What an object has in its dictionary and its slots, by the names that lookups have."""
    slots = {name: own(value, name) for name in slots_of(type(value))}
    return {name: found for name, found in slots.items() if found is not MISSING} | names_of(value)


def slots_of(kind: type) -> list[str]:
    """The names of a class's slots. Private ones have the name of the class in front."""
    members = [pair for each in kind.__mro__ for pair in dictionary_of(each).items()]
    return [name for name, each in members if isinstance(each, types.MemberDescriptorType) and name != "__dict__"]


def value_of(value: Any, attributes: tuple[Any, ...]) -> Any:
    """What attributes lead to, one after the other; `MISSING` if one is not there. What a tensor has is its own."""
    try:
        for name in attributes:
            if isinstance(name, Item):
                value = dict.get(value, name.key, MISSING) if type(value) in DICTIONARIES else MISSING
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


def in_cell(cell: types.CellType, attributes: tuple[Any, ...]) -> Any:
    value = content_of_cell(cell)
    return value_of(value, attributes) if attributes and value is not MISSING else value


def builtins_of(variables: dict[str, Any]) -> dict[str, Any]:
    """Where Python looks for a name that the global variables do not have."""
    builtins = variables.get("__builtins__", {})
    return vars(builtins) if isinstance(builtins, types.ModuleType) else builtins


def in_globals(variables: dict[str, Any], name: str, attributes: tuple[Any, ...]) -> Any:
    value = variables.get(name, MISSING)
    if value is MISSING:
        value = builtins_of(variables).get(name, MISSING)
    return value_of(value, attributes) if attributes and value is not MISSING else value


def has_own(module: nn.Module, name: str) -> bool:
    """Whether the module itself has an attribute, and not its class."""
    return any(name in attributes for attributes in module_dictionaries(module))


def of_class(value: Any, name: str) -> Any:
    """What the class of a value, or a base of it, has by a name; None if that is nothing."""
    return next((names[name] for kind in type(value).__mro__ if name in (names := dictionary_of(kind))), None)


def property_of(owner: Any, name: str) -> types.FunctionType | None:
    """The function of a property, if it may change anything or be changed."""
    if isinstance(owner, (torch.Tensor, types.ModuleType, type)):
        return None
    member = of_class(owner, name)
    function: Any = member.fget if isinstance(member, property) else None
    if isinstance(member, cached_property) and name not in names_of(owner):
        function = member.func
    is_open = isinstance(function, types.FunctionType) and not is_constant(function.__code__.co_filename)
    return function if is_open else None


def bound_property(get: Callable[[], Any], name: str) -> Any:
    function = property_of(owner := get(), name)
    return MISSING if function is None else types.MethodType(function, owner)


def is_computed(owner: Any, name: str) -> bool:
    """Whether Python of the user's or of PyTorch's runs for a lookup, as for a weight that is parametrized."""
    if isinstance(owner, (types.ModuleType, type)):
        return isinstance(owner, type) and name == "__dict__"  # which is a new proxy each time
    member = of_class(owner, name)
    if isinstance(member, partialmethod):  # whose lookup makes a new one
        return True
    is_own = has_own(owner, name) if isinstance(owner, nn.Module) else name in names_of(owner)
    functions = [of_class(owner, "__getattribute__")]
    if isinstance(member, property):
        functions.append(member.fget)
    elif member is not None and not (is_own and of_class(member, "__set__") is None):
        functions.append(of_class(member, "__get__"))
    elif member is None and not is_own:
        functions.append(of_class(owner, "__getattr__"))
    files = [each.__code__.co_filename for each in functions if isinstance(each, types.FunctionType)]
    is_module = isinstance(owner, nn.Module) and member is None  # whose own lookup changes nothing
    return any(not is_installed(file) or (is_torchs(file) and not is_module) for file in files)


def unwrapped(value: Any) -> Any:
    """What a decorator wraps, such as ``torch.no_grad()``, ``torch.compile`` and ``thunder.jit``, if it says so."""
    own = names_of(value)
    if isinstance(value, nn.Module) or not isinstance(own.get("__wrapped__"), types.FunctionType):
        return value
    return inspect.unwrap(value)


def is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType))


def links_of(path: Path) -> list[tuple[Any, str, Any]] | None:
    """What has to be the same for names to lead to the same function or method.

    Each is a namespace, a cell or an object, a name, and what it has of its own under the name. None if the names lead
    through anything else, such as a property.
    """
    value, names = path
    links: list[tuple[Any, str, Any]] = []
    if isinstance(value, types.CellType):
        links.append((value, "", value := in_cell(value, ())))
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
        is_method = found is not MISSING and (is_function(found) or isinstance(unwrapped(found), types.FunctionType))
        if not is_method or i < len(names) - 1:
            return None
    return links
